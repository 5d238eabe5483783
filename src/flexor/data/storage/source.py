"""The source of a dataset's files: a folder, the Hugging Face Hub or any fsspec URL.

All three have the same interface, with paths relative to the dataset's root. Tables and metadata are
provided as local files, so code above this module reads plain folders. Videos are read by byte ranges;
if they are not on this machine, only the needed parts are downloaded.
"""

import hashlib
import itertools
import os
import re
import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from flexor.core.digest import hash_json
from flexor.core.errors import DatasetError, first_line
from flexor.core.log import log
from flexor.core.machine import cache_folder
from flexor.core.model_files import download
from flexor.core.output_paths import replacing
from flexor.core.paths import UnsafePath, inside, safe_name
from flexor.core.secrets import HIDDEN, redacted, without_login
from flexor.data.storage.block_cache import block_cache
from flexor.data.storage.other_layouts import CONVERT_V1, V1, is_v1
from flexor.data.storage.ranges import LocalRanges, Ranges, RemoteRanges
from flexor.data.storage.remote import (
    HubFile,
    NoRanges,
    RemoteFile,
    copy_file,
    fsspec_file,
    http_options,
    look_up,
    retrying,
)

__all__ = ["FolderSource", "FsspecSource", "HubSource", "Source", "find_source", "lerobot_home"]

HUB_VERSIONS = ("v3.0", "v2.1", "v2.0")
"""Tags tried on the Hub if no revision is given, the preferred one first."""

TABLES = (".parquet", ".json", ".jsonl")
"""Suffixes of files that are always read completely; all other files are videos."""


class Source:
    """A dataset's files. `root` is the local folder that contains (or will contain) them."""

    root: Path
    streams = False
    """Whether videos are read by ranges over a network, and never downloaded completely for training."""
    kind = "disk"
    """Where videos are read from during training: disk, hub or bucket."""

    def __str__(self) -> str:
        return str(self.root)

    def path(self, name: str) -> Path:
        """Where the file is on this machine, or would be. Names come from metadata: see `core/paths.py`."""
        return inside(self.root, name)

    def local(self, name: str) -> Path:
        """The file's path on this machine; downloads it if needed. It may not exist."""
        return self.path(name)

    def here(self, name: str) -> Path | None:
        """The file's path if it is on this machine; nothing is downloaded."""
        path = self.path(name)
        return path if path.is_file() else None

    def exists(self, name: str) -> bool:
        return self.path(name).is_file()

    def size(self, name: str) -> int:
        return self.local(name).stat().st_size

    def list(self, folder: str, suffix: str) -> list[str]:
        """Names of all files under a folder, sorted."""
        paths = self.path(folder).rglob(f"*{suffix}")
        return sorted(path.relative_to(self.root).as_posix() for path in paths)

    def fetch(self, names: Iterable[str]) -> None:
        """Announce which files will be read, for sources that are faster in bulk."""

    def content(self, names: Iterable[str]) -> str:
        """A hash that changes when any of these files changes; computed without downloading them."""
        stats = [self.path(name).stat() for name in sorted(set(names)) if self.path(name).is_file()]
        return hash_json([(stat.st_size, stat.st_mtime_ns) for stat in stats])

    def holds(self, count: int) -> bool:
        """Whether `count` bytes of videos can be stored on this machine."""
        return True

    def ranges(self, name: str) -> Ranges:
        """The file by byte ranges; not downloaded completely if that can be avoided."""
        return LocalRanges(self.local(name))


class FolderSource(Source):
    def __init__(self, root: Path):
        self.root = root
        if not (root / "meta" / "info.json").is_file():
            if is_v1(root):
                raise DatasetError(f"{root} is {V1}. {CONVERT_V1}")
            raise DatasetError(
                f"{root} is not a LeRobot dataset: it has no meta/info.json. "
                f"Give the folder that contains meta/, data/ and videos/"
            )


class HubSource(Source):
    """A dataset repository on the Hub. It shares LeRobot's snapshot cache, so nothing is downloaded twice.

    With `streaming`, its videos are not downloaded but read by ranges. All data is read from the commit
    that the revision pointed to when the dataset was opened.
    """

    def __init__(
        self, repo_id: str, revision: str | None, streaming: bool = False, cache_bytes: int | None = None
    ):
        self.repo_id = repo_id
        self.streams = streaming
        self.kind = "hub" if streaming else "disk"
        self.revision = revision or self._newest_version()
        try:
            root = self._snapshot(["meta/*"], self.revision, local_files_only=False)
        except Exception as error:
            # If the Hub can't be reached, use a snapshot from an earlier run.
            root = self._snapshot(["meta/*"], self.revision, local_files_only=True)
            if root is None:
                raise self._unreachable(error) from error
        if root is None:
            raise DatasetError(f"{self} is not a LeRobot dataset: it has no meta/info.json")
        self.root = root
        self.commit = root.name
        self._blocks = block_cache(cache_bytes)
        self._lock = threading.Lock()
        self._sizes: dict[str, int] | None = None

    def __str__(self) -> str:
        return f"{self.repo_id} (revision {self.revision})"

    def local(self, name: str) -> Path:
        if self.streams and not super().exists(name) and name in self._listing():
            self._download([name])
        return self.path(name)

    def exists(self, name: str) -> bool:
        return super().exists(name) or (self.streams and name in self._listing())

    def size(self, name: str) -> int:
        return super().size(name) if super().exists(name) or not self.streams else self._listing()[name]

    def fetch(self, names: Iterable[str]) -> None:
        missing = sorted({name for name in names if not super(HubSource, self).exists(name)})
        if self.streams:
            missing = [name for name in missing if name.endswith(TABLES)]
        if missing:
            log.info("downloading %d files of %s", len(missing), self)
            self._download(missing)

    def content(self, names: Iterable[str]) -> str:
        return hash_json([self.repo_id, self.root.name])  # the snapshot's folder is named after its commit

    def holds(self, count: int) -> bool:
        return not self.streams or count <= self._blocks.limit

    def ranges(self, name: str) -> Ranges:
        if not self.streams or super().exists(name):
            return LocalRanges(self.path(name))
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self.repo_id, name, repo_type="dataset", revision=self.commit)
        if name not in self._listing():
            raise DatasetError(f"{url} does not exist. Check that the dataset on the Hub is complete")
        return RemoteRanges(HubFile(name=url, size=self._listing()[name], identity=url), self._blocks)

    def _listing(self) -> dict[str, int]:
        """Sizes of all files on the Hub, requested once."""
        with self._lock:
            if self._sizes is None:
                self._sizes = retrying(f"the list of files of {self}", self._list_hub)
            return self._sizes

    def _list_hub(self) -> dict[str, int]:
        from huggingface_hub import HfApi

        tree = HfApi().list_repo_tree(self.repo_id, recursive=True, revision=self.commit, repo_type="dataset")
        return {entry.path: entry.size for entry in tree if hasattr(entry, "size")}

    def _download(self, names: "list[str]") -> None:
        try:
            self._snapshot(names, self.commit, local_files_only=False)
        except Exception as error:
            raise self._unreachable(error) from error

    def _newest_version(self) -> str:
        """The preferred format version among the repository's tags; its main branch if it has no such tag."""
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
        cache = lerobot_home() / "hub"
        try:
            options: Any = {"kind": "dataset", "cache": cache, "cached_only": local_files_only}
            root = download(self.repo_id, patterns, revision, **options)
        except Exception:
            if local_files_only:
                return None
            raise
        return root if (root / "meta" / "info.json").is_file() else None

    def _unreachable(self, error: Exception) -> DatasetError:
        return DatasetError(
            f"dataset {self.repo_id} is missing or incomplete in {lerobot_home()} and can't be downloaded from the "
            f"Hub: {first_line(error)}. Check the name and the network (a private dataset needs `hf auth login`), or "
            f"give its folder with --dataset.root"
        )


class FsspecSource(Source):
    """Any URL that fsspec can open (s3://, gs://, http://, memory://).

    Tables, metadata and every file requested as a local file are copied when they are first read. A copy stays
    in the cache folder and is reused while the original is the same, as far as the server tells. The folder's name
    depends on the content of meta/info.json, so a dataset that has grown is read again.
    """

    streams = True
    kind = "bucket"

    def __init__(self, address: str, cache_bytes: int | None = None):
        import fsspec

        self.address = address.rstrip("/")
        try:
            options = http_options() if self._is_http else {}
            self.fs, self.base = fsspec.core.url_to_fs(self.address, **options)
        except Exception as error:
            raise DatasetError(
                f"{self.address} can't be opened: {type(error).__name__}: {error}. Check the URL (of the folder that "
                f"contains meta/, data/ and videos/); s3:// needs the package s3fs, gs:// gcsfs, http:// aiohttp"
            ) from error
        read = partial(self.fs.cat_file, f"{self.base}/meta/info.json")
        info = retrying(f"{self.address}/meta/info.json", read)
        # the same dataset, whether its password is in the address or comes from elsewhere
        address = without_login(self.address).replace(f"{HIDDEN}@", "")
        identity = hashlib.sha256(address.encode() + b"\0" + info).hexdigest()[:20]
        self.root = cache_folder() / "datasets" / identity
        self._blocks = block_cache(cache_bytes)
        self._lock = threading.Lock()
        self._file_locks: dict[str, threading.Lock] = {}
        self._names: set[str] | None = None
        self._infos: dict[str, dict[str, Any]] = {}

    def __str__(self) -> str:
        return redacted(self.address)

    def local(self, name: str) -> Path:
        target = self.path(name)
        with self._lock:
            lock = self._file_locks.setdefault(name, threading.Lock())
        with lock:
            if self.exists(name) and not self._is_copied(name):
                self._copy(name, target)
        return target

    def here(self, name: str) -> Path | None:
        return self.path(name) if self._is_copied(name) else None

    def exists(self, name: str) -> bool:
        names = self._listing()
        return name in names if names else self._info(name) is not None

    def size(self, name: str) -> int:
        return self._remote(name).size

    def list(self, folder: str, suffix: str) -> "list[str]":
        names = self._listing() or self._probe(folder, suffix)
        return sorted(name for name in names if name.startswith(f"{folder}/") and name.endswith(suffix))

    def _probe(self, folder: str, suffix: str) -> set[str]:
        """If the server can't list files: try LeRobot's numbered names until one does not exist."""

        def chunk(number: int) -> set[str]:
            files = (f"{folder}/chunk-{number:03d}/file-{file:03d}{suffix}" for file in itertools.count())
            return set(itertools.takewhile(self.exists, files))

        return set().union(*itertools.takewhile(bool, map(chunk, itertools.count())))

    def content(self, names: Iterable[str]) -> str:
        return hash_json([self.root.name])  # named after the address and meta/info.json

    def holds(self, count: int) -> bool:
        return count <= self._blocks.limit

    def ranges(self, name: str) -> Ranges:
        if self._is_copied(name):
            return LocalRanges(self.path(name))
        return RemoteRanges(self._remote(name), self._blocks)

    def _is_copied(self, name: str) -> bool:
        target = self.path(name)
        if not target.is_file() or target.stat().st_size != self.size(name):
            return False
        version = _version_file(target)
        return version.is_file() and version.read_text() == hash_json(self._remote(name).identity)

    def _remote(self, name: str) -> RemoteFile:
        address, info = f"{self.address}/{name}", self._info(name)
        if info is None:
            raise DatasetError(f"{address} does not exist. Check that the dataset there is complete")
        return fsspec_file(self.fs, f"{self.base}/{name}", address, info)

    @property
    def _is_http(self) -> bool:
        return self.address.startswith(("http://", "https://"))

    def _info(self, name: str) -> dict[str, Any] | None:
        """A file's info from the file system, requested once; None if the file does not exist."""
        with self._lock:
            info = self._infos.get(name)
        if info is None:
            info = retrying(f"{self.address}/{name}", partial(look_up, self.fs, f"{self.base}/{name}"))
            if info is not None:
                with self._lock:
                    self._infos[name] = info
        return info

    def _listing(self) -> set[str]:
        """Names of all files, requested once; empty if the server can't list files."""
        with self._lock:
            if self._names is None:
                # Over HTTP, a folder that fails would silently be missing from the list.
                options = {"on_error": "raise"} if self._is_http else {}
                find = partial(self.fs.find, self.base, **options)
                try:
                    paths = retrying(f"the list of files of {self.address}", find)
                except DatasetError as error:
                    log.warning("%s can't be listed (%s); checking each file instead", self.address, error)
                    paths = []
                base = self.base.rstrip("/") + "/"
                self._names = {path.removeprefix(base) for path in paths if path.startswith(base)}
            return self._names

    def _copy(self, name: str, target: Path) -> None:
        file = self._remote(name)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target) as aside:
                try:
                    copy_file(file, aside)
                except NoRanges:
                    retrying(file.name, lambda: self.fs.get_file(f"{self.base}/{name}", str(aside)))
                _version_file(target).unlink(missing_ok=True)
            _version_file(target).write_text(hash_json(file.identity))
        except OSError as error:
            raise DatasetError(
                f"{self.address}/{name} can't be copied to {target}: {error}. Free some space, or set "
                f"$FLEXOR_CACHE to a folder on another disk"
            ) from error


def _version_file(copy: Path) -> Path:
    """Says of which version of a file this is the copy."""
    return copy.with_name(f".{copy.name}.version")


def find_source(
    repo_id: str | None,
    root: str | Path | None,
    revision: str | None,
    streaming: bool = False,
    cache_bytes: int | None = None,
) -> Source:
    """LeRobot's rule: the given root; else $HF_LEROBOT_HOME/repo_id; else the Hub.

    With `streaming`, videos on the Hub are read by ranges instead of downloaded; videos at fsspec URLs
    always are. `cache_bytes` limits how much of that data is cached on disk.
    """
    if root is not None:
        address = str(root)
        if address.startswith("file://"):
            return FolderSource(Path(address.removeprefix("file://")))
        on_hub = re.fullmatch(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([^/]+))?/?", address)
        if on_hub:
            return HubSource(on_hub[1], on_hub[2] or revision, streaming, cache_bytes)
        if "://" in address:
            return FsspecSource(address, cache_bytes)
        return FolderSource(Path(address).expanduser())
    if repo_id is None:
        raise DatasetError("No dataset given: set --dataset.repo_id, or --dataset.root for a folder")
    if "://" in repo_id:
        return find_source(None, repo_id, revision, streaming, cache_bytes)
    try:
        local = lerobot_home() / safe_name(repo_id)
    except UnsafePath as error:
        raise DatasetError(
            f"{repo_id!r} is not a dataset's name: {error}. Give a folder with --dataset.root"
        ) from error
    if (local / "meta" / "info.json").is_file():
        return FolderSource(local)
    return HubSource(repo_id, revision, streaming, cache_bytes)


def lerobot_home() -> Path:
    """LeRobot's dataset folder: $HF_LEROBOT_HOME, by default $HF_HOME/lerobot."""
    hf_home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(os.environ.get("HF_LEROBOT_HOME") or f"{hf_home}/lerobot").expanduser()
