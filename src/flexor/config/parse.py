"""Reads settings from a YAML file, flags and key=value; later ones override. Checks them before the run starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flexor.config.accelerate_flags import accelerate_settings
from flexor.config.lerobot_flags import ALIASES, drop_ignored
from flexor.config.lerobot_runtime import NESTED
from flexor.config.optimizer import resolve_optimizer, resolve_scheduler
from flexor.config.schema import GROUPS, TrainConfig, validate
from flexor.config.setting_names import setting_names, suggestion
from flexor.core.errors import CheckpointError, ConfigError
from flexor.core.foreign_files import read_text, read_yaml
from flexor.core.model_files import neighbours
from flexor.core.run_files import CHECKPOINTS, POLICY_CONFIG, PRETRAINED, RUN_CONFIG, newest_checkpoints
from flexor.core.trust import require_trust, settled, trust
from flexor.core.typed import (
    Partial,
    Text,
    UnknownSetting,
    coerce,
    field_types,
    from_plain,
    load_yaml,
    parse_yaml,
)
from flexor.data.format.episode_list import episode_setting
from flexor.policies import LEROBOT_TYPES, ONLINE_POLICIES, PolicyConfig, policy_class
from flexor.policies.external import is_code, short_name
from flexor.policies.lerobot_settings import without_lerobot_settings
from flexor.policies.rename import split_renames
from flexor.policies.sizes import check_sizes

DATASETS = {"dataset.repo_id", "dataset.root", "dataset.mix"}  # settings that name a dataset
PACKAGED = Path(__file__).parent / "builtin"
DEFAULT_POLICY = "act"
ENV_PACKAGES = (
    "flexor",
    "gym_pusht",
    "gym_aloha",
    "gym_xarm",
    "gym_hil",
)  # of LeRobot's environments: any run may name them
SHORT_ENV_NAMES = ("place", "pusht", "aloha", "xarm", "gym_hil")  # of environments in these packages
# Settings of these groups depend on their type: choosing another type drops the settings given before.
TYPED_GROUPS = ("policy", "optimizer", "scheduler")


def parse_flags(argv: Sequence[str]) -> dict[str, Any]:
    """--a.b=c, --a.b c, --flag and a.b=c -> {"a.b": Text("c"), ...}."""
    flags: dict[str, Any] = {}
    arguments = list(argv)
    while arguments:
        word = arguments.pop(0)
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            if not equals:
                follows = arguments and not arguments[0].startswith("--")
                value = arguments.pop(0) if follows else "true"
        elif "=" in word:
            key, _, value = word.partition("=")
        else:
            raise ConfigError(f"Can't read {word!r}: settings are --key=value, --key value or key=value.")
        key = key.replace("-", "_")
        flags[ALIASES.get(key, key)] = Text(value)
    return flags


def to_words(flags: Mapping[str, Any]) -> list[str]:
    """The inverse of `parse_flags`, for the command line of another process."""
    return [f"--{key}={value}" for key, value in flags.items()]


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} -> {"a": {"b": 1}}."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, Partial())
            if not isinstance(node, dict):
                raise ConfigError(f"{key}={value}: {section} is a setting itself, not a group of settings.")
        node[name] = value
    return tree


def flatten(tree: dict[str, Any], where: str = "") -> dict[str, Any]:
    """The inverse of `nest`, for groups of settings only: other dictionaries stay values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{where}.{key}" if where else str(key)
        if name in (*GROUPS, "peft", *NESTED) and isinstance(value, dict):
            flat.update(flatten(value, name))
        elif name in GROUPS and value is None:
            continue  # LeRobot writes `env: null` for a group that was not given
        elif name == "dataset" and isinstance(value, list):
            flat["dataset.mix"] = value
        elif where == "peft" and value is None:
            continue  # LeRobot's default
        else:
            flat[ALIASES.get(name, name)] = value
    return flat


def read_file(name: str | Path) -> dict[str, Any]:
    """Read a YAML or JSON file of settings; a bare name such as `demo` is a file that comes with Flexor."""
    path = Path(name)
    packaged = PACKAGED / f"{name}.yaml"
    try:
        if not path.is_file() and packaged.is_file():
            path = packaged
        data = load_yaml(read_text(path))
    except OSError as error:
        names = ", ".join(p.stem for p in sorted(PACKAGED.glob("*.yaml")))
        raise ConfigError(
            f"Can't read the settings file {name}: {error.strerror}. Built-in files: {names}."
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} contains no settings: expected `key: value` lines.")
    return data


def load_config(argv: Sequence[str]) -> TrainConfig:
    """The settings of a command line."""
    return config_from_flags(parse_flags(argv))


def config_from_flags(flags: Mapping[str, Any]) -> TrainConfig:
    """The settings of parsed flags, which override those of --config; without data, the built-in demo."""
    if {"steps", "epochs"} <= flags.keys():
        raise ConfigError(f"steps={flags['steps']} and epochs={flags['epochs']}: give only one of them.")
    file = flags.get("config")
    if file is None and not DATASETS & flags.keys() and not _learns_online(flags):
        file = "demo"
    layers = [flatten(read_file(file))] if file is not None else []
    layers.append({key: value for key, value in flags.items() if key != "config"})
    merged = {key: value for layer in layers for key, value in layer.items()}
    trust(code_in(flags))
    require_trust(code_in(merged), file)
    return build_config(*layers, accelerate_settings(merged))


def _learns_online(flags: Mapping[str, Any]) -> bool:
    """Whether the policy needs no dataset: it learns while it acts."""
    if flags.get("policy_path") is not None:
        from flexor.policies.pretrained import read_config

        return read_config(str(flags["policy_path"])).learns_online
    return str(flags.get("policy.type")) in (*ONLINE_POLICIES, *LEROBOT_TYPES)


def plans_to_learn_online(flags: Mapping[str, Any]) -> bool:
    """The same of all settings, with those of the file that the flags name."""
    file = flags.get("config")
    return _learns_online({**(flatten(read_file(file)) if file is not None else {}), **flags})


def code_in(flat: Mapping[str, Any]) -> list[str]:
    """The code that settings ask to run: the policy's, if it is not built in, the environment's package, and the class
    by which a person takes over."""
    kind, (namespace, slash, _) = str(flat.get("policy.type")), str(flat.get("env.type")).partition("/")
    code = [settled(kind)] if is_code(kind) else []
    # with env.task, the environment is one of the package TYPE: see evaluate/envs.py
    is_package = slash or (flat.get("env.task") is not None and namespace not in (*SHORT_ENV_NAMES, "None"))
    package = flat.get("env.package") or (namespace if is_package else "")
    code += [str(package)] if package and package not in ENV_PACKAGES else []
    intervener = str(flat.get("rl.intervener"))
    return [*code, settled(intervener)] if is_code(intervener) else code


def build_config(*layers: dict[str, Any]) -> TrainConfig:
    """Build and check the settings from layers ({"policy.type": "act", ...}); later layers override."""
    flat: dict[str, Any] = {"policy.type": DEFAULT_POLICY}
    for layer in layers:
        for group in TYPED_GROUPS:
            before = settled(str(flat.get(f"{group}.type")))
            another = settled(str(layer.get(f"{group}.type", before))) != before
            if another or (group == "policy" and layer.get("policy_path") is not None):
                # the settings of the previous type do not apply to the new one
                flat = {k: v for k, v in flat.items() if not k.startswith(f"{group}.")}
        if "steps" in layer and "epochs" not in layer:
            flat.pop("epochs", None)
        if _names_other_data(layer, flat):
            # a name or revision that is left from an earlier layer would be that of data which is not used
            flat = {k: v for k, v in flat.items() if k not in (*DATASETS, "dataset.revision")}
        flat.update(layer)
    return _build(drop_ignored(flat))


def _names_other_data(layer: dict[str, Any], flat: dict[str, Any]) -> bool:
    named = [key for key in DATASETS if str(layer.get(key)).lower() not in ("none", "null", "")]
    return any(layer[key] != flat.get(key) for key in named)


def _build(flat: dict[str, Any]) -> TrainConfig:
    use_amp = coerce(flat.pop("policy.use_amp", False), bool, "policy.use_amp")
    if use_amp and "precision" not in flat:
        flat["precision"] = "bf16"
    for key in {"dataset.episodes", "dataset.exclude_episodes"} & flat.keys():
        flat[key] = _read_episodes(key, flat[key])
    _read_list_of_datasets(flat)
    check_rename_map(flat)
    try:
        config = _read_settings(flat)
    except UnknownSetting as error:
        raise _with_suggestion(error, flat) from None
    validate(config)
    policy, job_name = config.policy, config.job_name
    if job_name is None and is_code(policy.type):
        job_name = short_name(policy.type)  # a type with a path in it can't name a folder
    return replace(
        config,
        job_name=job_name,
        optimizer=resolve_optimizer(config.optimizer, policy),
        scheduler=resolve_scheduler(config.scheduler, policy),
    )


def _read_settings(flat: dict[str, Any]) -> TrainConfig:
    for key, value in flat.items():
        group, _, name = key.partition(".")
        if name and group not in field_types(TrainConfig):
            raise UnknownSetting(key, value)  # as typed
    tree = nest(flat)
    policy = _build_policy(tree.pop("policy", {}), flat.get("policy_path"))
    return _with_dataset_renames(from_plain(TrainConfig, {**tree, "policy": policy}))


def _with_suggestion(error: UnknownSetting, flat: dict[str, Any]) -> ConfigError:
    """The error with the name that was meant, of all settings."""
    group = error.name.rpartition(".")[0]
    in_value = group.partition(".")[0] in field_types(TrainConfig) and group not in GROUPS
    if in_value or (group == "policy" and flat.get("policy_path") is not None):
        return error  # it is compared with fewer names, which are the right ones
    names = setting_names(policy_class(str(flat.get("policy.type", DEFAULT_POLICY))).Config)
    return UnknownSetting(error.name, error.value, suggestion(error.name, names))


def check_rename_map(flat: dict[str, Any]) -> None:
    """The names in it have points themselves, so it can't be given one by one."""
    for key in flat:
        if key.startswith("rename_map."):
            raise ConfigError(
                f"{key}={flat[key]} is not valid: give all names at once, as in "
                "--rename_map='{observation.images.top: observation.images.camera1}'."
            )
    if str(flat.get("rename_map", "{}")).lower() in ("none", "null", ""):
        del flat["rename_map"]  # for LeRobot the same as {}


def _with_dataset_renames(config: TrainConfig) -> TrainConfig:
    """Names in `rename_map` that are not those of observations, such as {actions: action}, concern the dataset."""
    for_policy, for_dataset = split_renames(config.rename_map)
    names = {**config.dataset.rename_map, **for_dataset}
    return replace(config, rename_map=for_policy, dataset=replace(config.dataset, rename_map=names))


def _build_policy(settings: Any, path: str | None) -> PolicyConfig:
    if not isinstance(settings, dict):
        raise ConfigError(
            f"policy={settings} is not valid: use --policy.type={settings} or --policy.path=..."
        )
    if path is not None:
        from flexor.policies.pretrained import read_config

        return read_config(str(path), settings)
    # In LeRobot, null means that the features come from the dataset. In Flexor they always do.
    nulls = [
        k for k in ("input_features", "output_features") if str(settings.get(k)).lower() in ("none", "null")
    ]
    settings = {key: value for key, value in settings.items() if key not in nulls}
    cls = policy_class(str(settings.pop("type"))).Config
    policy = from_plain(cls, without_lerobot_settings(cls.only_in_lerobot, settings), "policy")
    check_sizes(policy)
    policy.validate()
    return policy


def _read_episodes(key: str, value: Any) -> Any:
    if not isinstance(value, str) or value.lower() in ("null", "none", ""):
        return value
    return episode_setting(value, key)


def _read_list_of_datasets(flat: dict[str, Any]) -> None:
    """dataset.repo_id as a list: of names, or of objects with settings, as dataset.mix has them."""
    weights = flat.get("dataset.weights")
    if isinstance(weights, Text) and weights[:1] not in ("[", "n"):
        flat["dataset.weights"] = Text(f"[{weights}]")  # 3,1
    names = flat.get("dataset.repo_id")
    if isinstance(names, Text) and names.startswith("["):
        names = parse_yaml(names)
    if not isinstance(names, list):
        return
    if all(isinstance(item, str) for item in names):
        flat["dataset.repo_id"] = ",".join(names)
        return
    flat["dataset.mix"] = [{"repo_id": item} if isinstance(item, str) else item for item in names]
    del flat["dataset.repo_id"]


def _of_lerobot(folder: Path) -> str:
    """What to do with a run or checkpoint of LeRobot's."""
    folders = [folder, *newest_checkpoints(folder / CHECKPOINTS)]
    if not any((each / PRETRAINED / POLICY_CONFIG).is_file() for each in folders):
        return ""
    return (
        " It looks like one of LeRobot's, whose optimizer and data order Flexor does not continue. Start a new run "
        f"from its weights: flexor train --policy.path={folder} --dataset.repo_id=... --output_dir=..."
    )


def read_run(folder: Path) -> dict[str, Any]:
    """The settings a run was started with, as nested plain data."""
    path = folder / RUN_CONFIG
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder{neighbours(folder)}.")
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is not a run of Flexor: it has no {RUN_CONFIG}.{_of_lerobot(folder)}"
        )
    try:
        data = read_yaml(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"Can't read the run's settings from {path}: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(
            f"{path} contains no settings. Restore it from the newest checkpoint's flexor.json."
        )
    return data
