"""Policies from outside this package: a user's file, a module, or an installed package.

The type of such a policy says where its code is: `path/to/file.py:MyPolicy` or `package.module:MyPolicy`. Python has
no sandbox: loading a policy runs its file. So Flexor runs only code that the user named, never code that only a file
names (`core/trust.py`). A package that registers a policy as an entry point was installed by the user, and its policy
has a plain name like the built-in ones.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import sys
import traceback
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType

from flexor.core.errors import ConfigError
from flexor.core.trust import settled
from flexor.core.typed import closest
from flexor.policies.base import Policy, PolicyConfig

GROUP = "flexor.policies"  # of entry points

_loaded: dict[str, type[Policy]] = {}


def is_code(kind: str) -> bool:
    """Whether a policy's type says where its code is, instead of being a name."""
    return ":" in kind


def short_name(kind: str) -> str:
    """The type as one word."""
    return kind.rpartition(":")[2]


def installed() -> dict[str, str]:
    """Policies from installed packages: name -> module:Class."""
    return {entry.name: entry.value for entry in importlib.metadata.entry_points(group=GROUP)}


def is_loaded(kind: str) -> bool:
    return settled(kind) in _loaded


def load_external(kind: str, code: str | None = None) -> type[Policy]:
    """The policy of this type. `code` says where its code is; by default the type does."""
    kind = settled(kind)
    if kind not in _loaded:
        module, _, name = (code or kind).rpartition(":")
        cls = _find(kind, _import(kind, module), name)
        cls.Config.type = kind  # saved in its checkpoints
        _loaded[kind] = cls
    return _loaded[kind]


def _import(kind: str, where: str) -> ModuleType:
    try:
        return _import_file(kind, Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"policy.type={kind}: there is no module {error.name}. Install it, or add its folder to PYTHONPATH."
        ) from error
    except Exception as error:  # whatever the user's code does
        raise ConfigError(
            f"policy.type={kind}: {where} can't be imported: {described(error, where)}."
        ) from error


def described(error: Exception, file: str | None) -> str:
    """An error in the user's code, with the line of their file that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    last = ([frame for frame in frames if frame.filename == file] or frames)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"


def _import_file(kind: str, file: Path) -> ModuleType:
    if not file.is_file():
        raise ConfigError(
            f"policy.type={kind}: there is no file {file}. It holds the policy's code: restore it, or give its new "
            "path with --policy.type=path/to/file.py:CLASS (a run resumes only with its original path)."
        )
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"  # two files may have the same name
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
    """The policy class in its module. Mistakes in it are reported before a run starts."""
    cls = getattr(module, name, None)
    if not isinstance(cls, type) or not issubclass(cls, Policy):
        policies = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Policy)]
        hint = closest(name, [n for n in policies if n != "Policy"]) if policies else "It has none."
        raise ConfigError(f"policy.type={kind}: {name!r} is not a subclass of Policy there. {hint}")
    config = getattr(cls, "Config", None)
    if not isinstance(config, type) or not issubclass(config, PolicyConfig):
        raise ConfigError(
            f"policy.type={kind}: {name}.Config must be a subclass of PolicyConfig, not {config!r}."
        )
    owners = [other.__name__ for other in _loaded.values() if other.Config is config and other is not cls]
    if config.__module__.partition(".")[0] == "flexor" or owners:
        raise ConfigError(
            f"policy.type={kind}: {config.__name__} belongs to another policy, so checkpoints would name that policy. "
            f"Define a config for this one: `class {name}Config({config.__name__})`."
        )
    if "__dataclass_params__" not in vars(config):
        raise ConfigError(
            f"policy.type={kind}: {config.__name__} is not a dataclass: write @dataclass above {config.__name__}."
        )
    unset = [f.name for f in fields(config) if f.default is MISSING and f.default_factory is MISSING]
    if unset:
        raise ConfigError(f"policy.type={kind}: {config.__name__}.{unset[0]} needs a default value.")
    return cls
