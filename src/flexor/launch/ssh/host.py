"""A machine that is reached by ssh: commands on it, files to it and from it. It needs bash, tar and GNU tail."""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from flexor.core.console import progress
from flexor.core.errors import ConfigError, FlexorError
from flexor.core.log import log

# no questions, since nobody may be there to answer; a dead connection is noticed after a minute
OPTIONS = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=30"]
OPTIONS += ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"]
UNREACHABLE = 255  # ssh's own exit code
LONGEST_WAIT = 30.0  # seconds between attempts to reconnect
BLOCK = 1 << 16


class Unreachable(FlexorError):
    """ssh has no connection."""


class SshHost:
    def __init__(self, address: str, options: Sequence[str] = ()):
        if address.startswith("-") or not address.strip():
            raise ConfigError(f"{address!r} is not a host: give USER@HOST, or a name in ~/.ssh/config.")
        self.address = address
        self.ssh = ["ssh", *OPTIONS, *options, address]

    def run(self, script: str, send: bytes | None = None) -> str:
        """What the script prints there. `send`: its standard input."""
        answer = subprocess.run(self._command(script), input=send or b"", capture_output=True)
        errors = answer.stderr.decode(errors="replace").strip()
        if answer.returncode == UNREACHABLE:
            raise Unreachable(
                f"ssh can't connect to {self.address}: {errors or 'no reason given'}\nTry: {shlex.join(self.ssh)} true"
            )
        if answer.returncode != 0:
            raise FlexorError(f"{self.address}: {errors or f'exit code {answer.returncode}'}")
        return answer.stdout.decode(errors="replace")

    def _command(self, script: str) -> list[str]:
        return [*self.ssh, f"bash -c {shlex.quote(script)}"]

    def exists(self, path: str) -> bool:
        return self.run(f"[ -e {shlex.quote(path)} ] && echo yes || true").strip() == "yes"

    def upload(self, folder: str, files: Mapping[str, bytes]) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(content), 0o644
                archive.addfile(entry, io.BytesIO(content))
        target = shlex.quote(folder)
        self.run(f"mkdir -p {target} && tar -xzf - -C {target}", packed.getvalue())

    def download(self, folder: str, target: Path) -> None:
        """Copy a folder into `target`, which is complete or not there."""
        size = int(self.run(f"du -sb {shlex.quote(folder)} | cut -f1").strip() or 0)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as arriving:
            received, report = 0, progress(f"fetching {gigabytes_of(size)}")
            packing = subprocess.Popen(
                self._command(f"tar -cf - -C {shlex.quote(folder)} ."), stdout=subprocess.PIPE
            )
            unpacking = subprocess.Popen(["tar", "-xf", "-", "-C", arriving], stdin=subprocess.PIPE)
            assert packing.stdout and unpacking.stdin
            while block := packing.stdout.read(BLOCK):
                unpacking.stdin.write(block)
                received += len(block)
                report(min(received, size), size)
            unpacking.stdin.close()
            if packing.wait() or unpacking.wait():
                raise FlexorError(f"Copying {folder} from {self.address} failed: fetch it again.")
            report(size, size)
            if target.exists():
                target.rmdir()  # it is empty: this was checked before the run
            Path(arriving).rename(target)
            Path(arriving).mkdir()  # for its removal

    def follow(self, file: str, pid_file: str) -> None:
        """Print a file as it grows, until the process of `pid_file` ends. Reconnects as often as it takes."""
        printed, failures = 0, 0
        while True:
            tail = f"tail -c +{printed + 1} -F --pid=$(cat {shlex.quote(pid_file)}) {shlex.quote(file)} 2>/dev/null"
            with subprocess.Popen(self._command(tail), stdout=subprocess.PIPE) as process:
                assert process.stdout
                while block := process.stdout.read1(BLOCK):  # type: ignore[attr-defined]
                    sys.stdout.write(block.decode(errors="replace"))
                    sys.stdout.flush()
                    printed, failures = printed + len(block), 0
            if process.returncode != UNREACHABLE:
                return
            failures += 1
            if failures == 1:
                log.warning("lost the connection to %s; the run continues. Reconnecting ...", self.address)
            time.sleep(min(2.0**failures, LONGEST_WAIT))


def gigabytes_of(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
