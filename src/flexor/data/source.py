"""Where a dataset's files come from: a folder, the Hugging Face Hub or any fsspec address.

All three answer the same questions with paths relative to the dataset's root, and hand out local
files: everything above this module reads plain folders.
"""

import hashlib
import os
import re
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path

from flexor.data.ranges import LocalRanges, Ranges
from flexor.errors import DatasetError
from flexor.log import log
from flexor.machine import cache_folder

__all__ = ["FolderSource", "FsspecSource", "HubSource", "Source", "find_source", "lerobot_home"]

HUB_VERSIONS = ("v3.0", "v2.1", "v2.0")
"""Tags tried on the Hub when no revision is given, best first."""


class Source:
    """A dataset's files. `root` is the local folder they lie (or will lie) in."""

    root: Path

    def __str__(self) -> str:
        return str(self.root)

    def local(self, name: str) -> Path:
        """The file's path on this machine; fetches it if need be. It may not exist."""
        return self.root / name

    def exists(self, name: str) -> bool:
        return (self.root / name).is_file()

    def size(self, name: str) -> int:
        return self.local(name).stat().st_size

    def list(self, folder: str, suffix: str) -> list[str]:
        """Names of all files under a folder, sorted."""
        found = (self.root / folder).rglob(f"*{suffix}")
        return sorted(path.relative_to(self.root).as_posix() for path in found)

    def fetch(self, names: Iterable[str]) -> None:
        """Announce which files will be read, for sources that are faster in bulk."""

    def ranges(self, name: str) -> Ranges:
        """The file by byte ranges; not fetched as a whole where that can be avoided."""
        return LocalRanges(self.local(name))


class FolderSource(Source):
    def __init__(self, root: Path):
        self.root = root
        if not (root / "meta" / "info.json").is_file():
            raise DatasetError(
                f"{root} is no LeRobot dataset: it has no meta/info.json. "
                f"Give the folder that contains meta/, data/ and videos/"
            )


class HubSource(Source):
    """A dataset repository on the Hub, in LeRobot's own snapshot cache: neither downloads twice."""

    def __init__(self, repo_id: str, revision: str | None):
        self.repo_id = repo_id
        self.revision = revision or self._newest_version()
        try:
            root = self._snapshot(["meta/*"], self.revision, local_files_only=False)
        except Exception as error:
            # Without the Hub a snapshot from an earlier run will do.
            root = self._snapshot(["meta/*"], self.revision, local_files_only=True)
            if root is None:
                raise self._unreachable(error) from error
        if root is None:
            raise DatasetError(f"{self} is no LeRobot dataset: it has no meta/info.json")
        self.root = root

    def __str__(self) -> str:
        return f"{self.repo_id} (revision {self.revision})"

    def fetch(self, names: Iterable[str]) -> None:
        missing = sorted({name for name in names if not self.exists(name)})
        if missing:
            log.info("downloading %d files of %s", len(missing), self)
            try:
                self._snapshot(missing, self.revision, local_files_only=False)
            except Exception as error:
                raise self._unreachable(error) from error

    def _newest_version(self) -> str:
        """The best format version the repository is tagged with; its main branch if it has no such tag."""
        from huggingface_hub import HfApi

        try:
            refs = HfApi().list_repo_refs(self.repo_id, repo_type="dataset")
        except Exception as error:
            for version in (*HUB_VERSIONS, "main"):
                if self._snapshot(["meta/*"], version, local_files_only=True):
                    log.warning("the Hub does not answer (%s); using the cached %s", error, version)
                    return version
            raise self._unreachable(error) from error
        tags = {tag.name for tag in refs.tags}
        return next((version for version in HUB_VERSIONS if version in tags), "main")

    def _snapshot(self, patterns: "list[str]", revision: str, local_files_only: bool) -> Path | None:
        from huggingface_hub import snapshot_download

        try:
            folder = snapshot_download(
                self.repo_id,
                repo_type="dataset",
                revision=revision,
                cache_dir=lerobot_home() / "hub",
                allow_patterns=patterns,
                local_files_only=local_files_only,
            )
        except Exception:
            if local_files_only:
                return None
            raise
        root = Path(folder)
        return root if (root / "meta" / "info.json").is_file() else None

    def _unreachable(self, error: Exception) -> DatasetError:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return DatasetError(
            f"dataset {self.repo_id} is not (or not whole) in {lerobot_home()} and cannot be had from the Hub: "
            f"{reason}. "
            f"Check the name and the network (a private dataset needs `hf auth login`), or give its folder "
            f"with --dataset.root"
        )


class FsspecSource(Source):
    """Any address fsspec can open (s3://, gs://, hf://, http://, memory://); files are copied on demand.

    A copy is kept under the cache folder and used again while its size matches the original's. The
    folder's name depends on the content of meta/info.json, so a dataset that grew is read afresh.
    """

    def __init__(self, address: str):
        import fsspec

        self.address = address.rstrip("/")
        try:
            self.fs, self.base = fsspec.core.url_to_fs(self.address)
            info = self.fs.cat_file(f"{self.base}/meta/info.json")
        except Exception as error:
            raise DatasetError(
                f"{self.address}/meta/info.json cannot be read: {type(error).__name__}: {error}. Check the "
                f"address (the folder that contains meta/, data/ and videos/) and the credentials; "
                f"s3:// needs s3fs installed, gs:// gcsfs, http:// aiohttp"
            ) from error
        identity = hashlib.sha256(self.address.encode() + b"\0" + info).hexdigest()[:20]
        self.root = cache_folder() / "datasets" / identity
        self._lock = threading.Lock()
        self._file_locks: dict[str, threading.Lock] = {}
        self._sizes: dict[str, int] | None = None

    def __str__(self) -> str:
        return self.address

    def local(self, name: str) -> Path:
        target = self.root / name
        with self._lock:
            lock = self._file_locks.setdefault(name, threading.Lock())
        with lock:
            if self.exists(name) and not (target.is_file() and target.stat().st_size == self.size(name)):
                self._copy(name, target)
        return target

    def exists(self, name: str) -> bool:
        return name in self._listing() or (not self._listing() and self.fs.exists(f"{self.base}/{name}"))

    def size(self, name: str) -> int:
        size = self._listing().get(name)
        return int(self.fs.size(f"{self.base}/{name}")) if size is None else size

    def list(self, folder: str, suffix: str) -> "list[str]":
        return sorted(n for n in self._listing() if n.startswith(f"{folder}/") and n.endswith(suffix))

    def _listing(self) -> dict[str, int]:
        """Sizes of all files, asked for once; empty where the server cannot list."""
        with self._lock:
            if self._sizes is None:
                try:
                    found = self.fs.find(self.base, detail=True)
                except Exception as error:
                    log.warning("%s cannot be listed (%s); asking for each file", self.address, error)
                    found = {}
                base = self.base.rstrip("/") + "/"
                self._sizes = {
                    path.removeprefix(base): int(entry["size"])
                    for path, entry in found.items()
                    if entry.get("size") is not None
                }
            return self._sizes

    def _copy(self, name: str, target: Path) -> None:
        # Written aside and renamed, so that an interrupted copy is never taken for the file.
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        try:
            with self.fs.open(f"{self.base}/{name}", "rb") as remote, partial.open("wb") as local:
                shutil.copyfileobj(remote, local, 1 << 20)
        except Exception as error:
            partial.unlink(missing_ok=True)
            raise DatasetError(f"{self.address}/{name} could not be copied: {error}. Try again") from error
        partial.replace(target)


def is_repo_id(name: str) -> bool:
    """Whether this could be a repository on the Hub rather than a folder: user/name."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not name.startswith(".")


def find_source(
    repo_id: str | None,
    root: str | Path | None,
    revision: str | None,
    streaming: bool = False,
    cache_bytes: int | None = None,
) -> Source:
    """LeRobot's rule: the given root; else $HF_LEROBOT_HOME/repo_id; else the Hub."""
    if root is not None:
        address = str(root)
        if address.startswith("file://"):
            return FolderSource(Path(address.removeprefix("file://")))
        if "://" in address:
            return FsspecSource(address)
        return FolderSource(Path(address).expanduser())
    if repo_id is None:
        raise DatasetError("no dataset given: set --dataset.repo_id, or --dataset.root for a folder")
    if "://" in repo_id:
        return find_source(None, repo_id, revision)
    local = lerobot_home() / repo_id
    if (local / "meta" / "info.json").is_file():
        return FolderSource(local)
    return HubSource(repo_id, revision)


def lerobot_home() -> Path:
    """Where LeRobot keeps datasets: $HF_LEROBOT_HOME, by default $HF_HOME/lerobot."""
    hf_home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(os.environ.get("HF_LEROBOT_HOME") or f"{hf_home}/lerobot").expanduser()
