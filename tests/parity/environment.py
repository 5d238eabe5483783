"""An environment with lerobot 0.6.1 on CPU, apart from ours: it needs Python 3.12 and an older torch."""

import os
import shutil
import subprocess
import urllib.request
from pathlib import Path

from flexor.core.errors import FlexorError

LEROBOT = "lerobot==0.6.1"
TORCH = ["torch==2.7.1", "torchvision==0.22.1"]
# Its builds end in +cpu, which pip takes for newer, and need no CUDA.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# What its extras `training`, `diffusion`, `multi-task-dit`, `smolvla`, `wallx` and `peft` need to train on a CPU,
# besides torch. Installed without resolving, because the resolver would also bring robots' drivers and a viewer.
DEPENDENCIES = """
accelerate==1.15.0 aiohappyeyeballs aiohttp aiosignal anyio attrs av==15.1.0 certifi charset-normalizer
click cloudpickle datasets==4.8.5 diffusers==0.39.0 dill==0.4.1 docopt draccus==0.11.6 einops==0.8.2
Farama-Notifications filelock frozenlist fsspec==2026.2.0 gymnasium h11 hf-xet httpcore httpx
huggingface_hub==1.33.0 idna importlib_metadata Jinja2 jsonlines lazy-importer MarkupSafe mergedeep mpmath
multidict multiprocess==0.70.19 mypy_extensions networkx num2words numpy==2.2.6 opencv-python-headless packaging
peft==0.21.2
pandas==2.3.3 pillow propcache psutil pyarrow python-dateutil pytz PyYAML regex requests safetensors
scipy setuptools sympy termcolor tokenizers==0.22.2 toml tqdm transformers==5.5.4 typing_extensions typing-inspect
qwen-vl-utils==0.0.14 torchdiffeq==0.2.5
tzdata urllib3 xxhash yarl zipp
"""


def lerobot_python(root: Path) -> Path:
    """The Python to run LeRobot with; the environment is made on the first call, and when it has to have more."""
    named = os.environ.get("LEROBOT_PYTHON")
    if named:
        return Path(named).absolute()
    folder = root / ".venv-lerobot"
    python, ready = folder / "bin/python", folder / ".ready"
    packages = " ".join([LEROBOT, *TORCH, *DEPENDENCIES.split()])
    if not ready.is_file() or ready.read_text() != packages:
        print(f"installing {LEROBOT} into {folder} ...", flush=True)
        subprocess.run([find_python312(), "-m", "venv", "--clear", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # with what it needs, because PyPI's build for x86 does not load without CUDA's libraries
        subprocess.run([*install, *torch_index(), *TORCH], check=True)
        subprocess.run([*install, "--no-deps", LEROBOT, *DEPENDENCIES.split()], check=True)
        ready.write_text(packages)
    return python


def torch_index() -> list[str]:
    """Asked first whether it is there, because pip would ask again and again for every package."""
    try:
        with urllib.request.urlopen(TORCH_INDEX, timeout=120):
            return ["--extra-index-url", TORCH_INDEX]
    except OSError as error:
        print(
            f"{TORCH_INDEX} can't be reached ({error}): installing PyPI's torch, several GB on x86",
            flush=True,
        )
        return []


def find_python312() -> str:
    """$PYTHON312, python3.12 on the path, or one that pyenv built."""
    built = sorted(Path.home().glob(".pyenv/versions/3.12*/bin/python3.12"), reverse=True)
    for python in (os.environ.get("PYTHON312"), shutil.which("python3.12"), *built):
        # pyenv has a python3.12 on the path that only says that another version is in use
        if python and subprocess.run([python, "--version"], capture_output=True, check=False).returncode == 0:
            return str(python)
    raise FlexorError(
        "LeRobot 0.6.1 needs Python 3.12, and there is none here: install it, or name one with PYTHON312=..., "
        "or name a Python that has lerobot installed with LEROBOT_PYTHON=..."
    )
