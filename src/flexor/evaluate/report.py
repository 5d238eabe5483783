"""`flexor eval`: runs episodes with a saved policy and reports the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flexor.config.lerobot_flags import drop_ignored
from flexor.config.parse import check_rename_map, code_in, flatten, nest, parse_flags, read_run
from flexor.config.schema import EnvConfig, EvalConfig
from flexor.core.console import Progress
from flexor.core.devices import find_device
from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.core.output_paths import check_output_folder
from flexor.core.paths import inside
from flexor.core.run_files import RUN_CONFIG, VIDEOS
from flexor.core.trust import require_trust, trust
from flexor.core.typed import closest, coerce, from_plain
from flexor.evaluate.play import play
from flexor.evaluate.rollout import PolicyActor, summarize
from flexor.evaluate.served import ServedActor, ServerAddress
from flexor.policies.pretrained import find_folder, load_pretrained
from flexor.policies.processing.rename_and_move import with_renaming
from flexor.policies.rename import check_names

GROUPS = ("env", "eval", "policy")
TOP_LEVEL = ("seed", "rename_map")


def evaluate_policy(
    path: str | None,
    settings: Sequence[str],
    videos: Path | None = None,
    progress: Progress | None = None,
    server: ServerAddress | None = None,
) -> tuple[dict[str, Any], str]:
    """Success of the policy at `path`, or of the one that a server has.

    Settings that are not given come from the policy's training run, if it is at `path`.
    """
    flags = _checked_flags(settings)
    if (path is None) == (server is None):
        raise ConfigError(
            f"{path} and --server={server and server.url}: name one of them, the one with the policy."
        )
    folder = None if path is None else find_folder(path)
    saved = _run_settings(folder) if folder else {}
    trust(code_in(flags))
    require_trust(code_in({**saved, **flags}), folder)
    tree = nest({**saved, **flags})
    env = from_plain(EnvConfig, tree.get("env", {}), "env")
    eval_settings = from_plain(EvalConfig, tree.get("eval", {}), "eval")
    if env.type is None:
        raise ConfigError("No environment given: set --env.type=place, or any gymnasium id.")
    if videos is not None and eval_settings.videos == 0:
        eval_settings = replace(eval_settings, videos=min(3, eval_settings.n_episodes))
    if eval_settings.videos:
        videos = videos or (_video_folder(folder) if folder else Path(VIDEOS))
        check_output_folder(videos, "--videos")
    if server is not None:
        actor = _served(server, flags)
        try:
            summary = summarize(play(actor, env, eval_settings, videos, progress))
        finally:
            actor.close()
        return {"server": server.url, "env": env.type, **asdict(summary)}, f"{server.url}: {summary}"
    assert folder is not None
    summary = summarize(play(_local(folder, flags), env, eval_settings, videos, progress))
    return {"policy": str(folder), "env": env.type, **asdict(summary)}, f"{folder}: {summary}"


def _checked_flags(settings: Sequence[str]) -> dict[str, Any]:
    flags = drop_ignored(parse_flags(settings))
    check_rename_map(flags)
    if coerce(flags.pop("policy.use_amp", False), bool, "policy.use_amp"):
        log.warning("--policy.use_amp has no effect: evaluation runs in the policy's own precision")
    for key in flags:
        if key.split(".")[0] not in (*GROUPS, *TOP_LEVEL):
            valid = [*(f"{group}." for group in GROUPS), *TOP_LEVEL]
            raise ConfigError(f"Unknown setting {key}={flags[key]!r}. {closest(key, valid)}")
    return flags


def _local(folder: Path, flags: dict[str, Any]) -> PolicyActor:
    overrides = nest(flags).get("policy", {})
    device = find_device(coerce(overrides.pop("device", None), str | None, "policy.device"))
    seed = coerce(flags.get("seed", 0), int, "seed")
    policy = load_pretrained(str(folder), str(device), overrides)
    if "rename_map" in flags:
        rename_map = coerce(flags["rename_map"], dict[str, str], "rename_map")
        check_names(rename_map)
        policy.preprocessor = with_renaming(policy.preprocessor, rename_map)
    return PolicyActor(policy, seed)


def _served(server: ServerAddress, flags: dict[str, Any]) -> ServedActor:
    if "rename_map" in flags:
        raise ConfigError(
            "--rename_map: the server has the policy. Give `flexor serve` its inputs' names with --map."
        )
    policy_flags = [key for key in flags if key in TOP_LEVEL or key.startswith("policy.")]
    if policy_flags:
        raise ConfigError(f"--{policy_flags[0]}: the server has the policy. Give this to `flexor serve`.")
    return ServedActor(server)


def _video_folder(folder: Path) -> Path:
    """In the run's video folder, or in the current folder."""
    run = _run_folder(folder)
    return inside(run, f"{VIDEOS}/eval") if run else Path(VIDEOS)


def _run_folder(folder: Path) -> Path | None:
    return next((p for p in folder.absolute().parents[:3] if (p / RUN_CONFIG).is_file()), None)


def _run_settings(folder: Path) -> dict[str, Any]:
    """The env and eval settings of the run that contains the checkpoint, if any."""
    run = _run_folder(folder)
    flat = flatten(read_run(run)) if run else {}
    return {k: v for k, v in flat.items() if k.split(".")[0] in ("env", "eval")}
