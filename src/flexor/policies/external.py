"""Policies from outside of this package: a user's file, a module, or what an installed package brings.

The type of such a policy says where its code is: `path/to/file.py:MyPolicy` or `package.module:MyPolicy`. Python has
no sandbox: to load a policy is to run its file. So code is loaded because the user named it, never because something
that was downloaded did (`pretrained.py` sees to that). What a package registers as an entry point was installed by
the user, and has a plain name like the policies here.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import sys
import traceback
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType

from flexor.core.errors import ConfigError
from flexor.core.typed import closest
from flexor.policies.base import Policy, PolicyConfig

GROUP = "flexor.policies"  # of entry points

_loaded: dict[str, type[Policy]] = {}


def is_code(kind: str) -> bool:
    """Whether a policy's type says where its code is, instead of being a name."""
    return ":" in kind


def settled(kind: str) -> str:
    """The type as it is kept: a file by its whole path, so that it is found from any folder."""
    where, colon, name = kind.rpartition(":")
    if not where.endswith(".py"):
        return kind
    return f"{os.path.abspath(Path(where).expanduser())}{colon}{name}"  # noqa: PTH100  (which also drops `..`)


def short_name(kind: str) -> str:
    """The type as one word."""
    return kind.rpartition(":")[2]


def installed() -> dict[str, str]:
    """Policies that installed packages bring: name -> module:Class."""
    return {entry.name: entry.value for entry in importlib.metadata.entry_points(group=GROUP)}


def is_loaded(kind: str) -> bool:
    return settled(kind) in _loaded


def load_own(kind: str, code: str | None = None) -> type[Policy]:
    """The policy of this type, whose code is where `code` says, or where the type itself does."""
    kind = settled(kind)
    if kind not in _loaded:
        where, _, name = (code or kind).rpartition(":")
        found = _find(kind, _import(kind, where), name)
        found.Config.type = kind  # what a checkpoint of it says
        _loaded[kind] = found
    return _loaded[kind]


def _import(kind: str, where: str) -> ModuleType:
    try:
        return _import_file(kind, Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"policy.type={kind}: there is no module {error.name}. Install it, or set PYTHONPATH to where it is."
        ) from error
    except Exception as error:  # whatever the user's code does
        raise ConfigError(
            f"policy.type={kind}: {where} can't be imported: {described(error, where)}."
        ) from error


def described(error: Exception, file: str | None) -> str:
    """An error of the user's code, with the line of their file that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    last = ([frame for frame in frames if frame.filename == file] or frames)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"


def _import_file(kind: str, file: Path) -> ModuleType:
    if not file.is_file():
        raise ConfigError(
            f"policy.type={kind}: there is no file {file}. It holds the policy's code: bring it back, or name the "
            "file where it is now with --policy.type=path/to/file.py:CLASS (a run goes on only with the one it had)."
        )
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"  # two files may have one name
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _find(kind: str, module: ModuleType, name: str) -> type[Policy]:
    """The class in its module, if it is one that can be trained; mistakes are named before a run begins."""
    found = getattr(module, name, None)
    if not isinstance(found, type) or not issubclass(found, Policy):
        policies = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Policy)]
        there = closest(name, [n for n in policies if n != "Policy"]) if policies else "It has none."
        raise ConfigError(f"policy.type={kind}: {name!r} is not a subclass of Policy there. {there}")
    config = getattr(found, "Config", None)
    if not isinstance(config, type) or not issubclass(config, PolicyConfig):
        raise ConfigError(
            f"policy.type={kind}: {name}.Config must be a subclass of PolicyConfig, not {config!r}."
        )
    others = [other.__name__ for other in _loaded.values() if other.Config is config and other is not found]
    if config.__module__.partition(".")[0] == "flexor" or others:
        raise ConfigError(
            f"policy.type={kind}: {config.__name__} belongs to another policy. Make one of its own, "
            f"`class {name}Config({config.__name__})`, or its checkpoints would say that they are the other's."
        )
    if "__dataclass_params__" not in vars(config):
        raise ConfigError(f"policy.type={kind}: write @dataclass above {config.__name__}.")
    unset = [f.name for f in fields(config) if f.default is MISSING and f.default_factory is MISSING]
    if unset:
        raise ConfigError(f"policy.type={kind}: {config.__name__}.{unset[0]} needs a default value.")
    return found
