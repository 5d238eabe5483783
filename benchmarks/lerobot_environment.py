"""An environment with lerobot 0.6.1 and its fastest video decoder, torchcodec, apart from ours.

torchcodec needs FFmpeg's shared libraries and brings none. PyAV's wheel, which LeRobot needs anyway, carries
them under names of its own; a link per library under the common name, beside the real ones, is all that is
missing. So nothing need be installed on the machine, on x86_64 or on ARM, and LeRobot decodes with a newer
dav1d than most distributions have.

On ARM the registry has torchcodec only as a CUDA build. It decodes on the CPU all the same, but it needs
torch's CUDA build too, and NVIDIA's picture library: a few GB of downloads.
"""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from parity.environment import DEPENDENCIES, LEROBOT, find_python312, torch_index

# The only pair within LeRobot's limits that torchcodec is built for on ARM too.
TORCH = ["torch==2.11.0", "torchvision==0.26.0"]
TORCHCODEC = "torchcodec==0.11.1"
FOLDER = Path(__file__).parent / ".venv-lerobot"


def lerobot_python() -> Path:
    """The Python to run LeRobot with: $LEROBOT_BENCH_PYTHON, or an environment made on the first call."""
    override = os.environ.get("LEROBOT_BENCH_PYTHON")
    python = Path(override).absolute() if override else FOLDER / "bin/python"
    if not override and not (FOLDER / ".ready").is_file():
        print(f"installing {LEROBOT} with torchcodec into {FOLDER} ...", file=sys.stderr, flush=True)
        subprocess.run([find_python312(), "-m", "venv", "--clear", FOLDER], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        arm = platform.machine() in ("aarch64", "arm64")
        more = ["nvidia-npp<14"] if arm else torch_index()
        subprocess.run([*install, *more, *TORCH], check=True)
        subprocess.run([*install, "--no-deps", TORCHCODEC, LEROBOT, *DEPENDENCIES.split()], check=True)
        (FOLDER / ".ready").touch()
    link_ffmpeg(python)
    return python


def library_folders(python: Path) -> list[Path]:
    """Where PyAV's wheel keeps FFmpeg and NVIDIA's wheels their libraries: LeRobot's LD_LIBRARY_PATH."""
    where = "import sysconfig; print(sysconfig.get_path('platlib'))"
    packages = subprocess.run(
        [python, "-c", where], check=True, capture_output=True, text=True
    ).stdout.strip()
    return [Path(packages) / "av.libs", *Path(packages).glob("nvidia/cu*/lib")]


def link_ffmpeg(python: Path) -> None:
    """libavcodec.so.61 -> libavcodec-b09587ce.so.61.19.101, and so on, in PyAV's folder of libraries."""
    for library in library_folders(python)[0].glob("lib*-*.so.*"):
        name = re.match(r"(lib(?:av|sw)[a-z]+)-[0-9a-f]+(\.so\.\d+)\.", library.name)
        link = library.with_name("".join(name.groups())) if name else library
        if not link.exists():
            link.symlink_to(library.name)


def environment(python: Path) -> dict[str, str]:
    """What LeRobot runs with: libraries to be found, no network."""
    folders = [*map(str, library_folders(python)), os.environ.get("LD_LIBRARY_PATH", "")]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, folders)), "HF_HUB_OFFLINE": "1"}


def has_torchcodec(python: Path) -> bool:
    """Whether torchcodec loads; if it does not, LeRobot falls back to a slower way, and that must be said."""
    words = [python, "-c", "from torchcodec.decoders import VideoDecoder"]
    done = subprocess.run(words, env=environment(python), capture_output=True, text=True, check=False)
    if done.returncode:
        print(
            f"WARNING: torchcodec does not load: LeRobot is measured with PyAV, which is NOT its best.\n"
            f"{done.stderr[-1000:]}",
            file=sys.stderr,
        )
    return done.returncode == 0


if __name__ == "__main__":
    interpreter = lerobot_python()
    print(interpreter, "with torchcodec" if has_torchcodec(interpreter) else "without torchcodec")
