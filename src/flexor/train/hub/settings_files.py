"""The files of a run that hold settings, as they are pushed: with names instead of the paths of this machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from flexor.core.errors import CheckpointError
from flexor.core.foreign_files import read_json, read_yaml
from flexor.core.hub_errors import Content
from flexor.core.published import published
from flexor.core.run_files import MANIFEST
from flexor.core.typed import QuickDumper

# by their names, in whichever folder: other files, such as those of tokenizers, may have texts that look like paths
SETTINGS = {
    *("config.yaml", "run.json", "flexor.json", "train_config.json", "config.json", "adapter_config.json"),
    *("policy_preprocessor.json", "policy_postprocessor.json"),
}


def with_published_settings(files: Mapping[str, Path]) -> dict[str, Content]:
    """The files by name, settings as others may read them. The manifests of checkpoints are made to fit."""
    contents: dict[str, Content] = {name: published_file(name, path) for name, path in files.items()}
    for name, path in files.items():
        if name == MANIFEST or name.endswith(f"/{MANIFEST}"):
            contents[name] = _fitting_manifest(path, name.removesuffix(MANIFEST), contents)
    return contents


def published_file(name: str, path: Path) -> Content:
    """The file itself, or, if it holds settings that others must not read, its new content."""
    if PurePosixPath(name).name not in SETTINGS:
        return path
    is_yaml = path.suffix == ".yaml"
    try:
        settings = read_yaml(path) if is_yaml else read_json(path)
    except ValueError as error:
        raise CheckpointError(f"{path} can't be read, so nothing is pushed: {error}") from error
    public = published(settings)
    if public == settings:
        return path
    text = yaml.dump(public, Dumper=QuickDumper, sort_keys=False) if is_yaml else json.dumps(public, indent=2)
    return text.encode()


def _fitting_manifest(path: Path, folder: str, contents: Mapping[str, Content]) -> Content:
    """The manifest of the checkpoint in `folder`, with sizes and hashes of what is pushed instead of the files."""
    manifest: dict[str, Any] = read_json(path)
    changed = {file: contents.get(folder + file) for file in manifest["files"]}
    new = {file: content for file, content in changed.items() if isinstance(content, bytes)}
    if not new:
        return path
    for file, content in new.items():
        digest = hashlib.sha256(content).hexdigest()
        manifest["files"][file] |= {"size": len(content), "sha256": digest}
    return json.dumps(manifest, indent=2).encode()
