"""The README and the docs, taken at their word: commands run, links lead somewhere, tables are complete.

A `bash` block is run: a page's blocks one after the other in one shell, in a folder that has the dataset
and the run which the README makes. `flexor` is a script that calls the program with the same arguments,
except that numbers of steps and episodes are smaller and the network is tiny (see support/quick_flexor.py). A `console`
block can't run here (downloads, accounts, GPUs, make); its `flexor` commands must at least parse, and so must the
flags of those who launch them. A `python` block that begins with a file's name (`# my_policy.py`) is that file.

    python tests/test_docs.py        prints the table of LeRobot's settings for docs/train.md
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch

from flexor.cli import main as cli
from flexor.cli.collect import parser as collect_flags
from flexor.cli.plan import parser as plan_flags
from flexor.cli.serve import parser as serve_flags
from flexor.cli.ui import parser as ui_flags
from flexor.config.accelerate_flags import SHARDING
from flexor.config.lerobot_flags import ALIASES, HARMLESS, IGNORED
from flexor.config.lerobot_runtime import TRANSLATED
from flexor.config.parse import flatten, load_config, parse_flags, read_file
from flexor.config.schema import GROUPS, ParallelConfig
from flexor.evaluate import report
from flexor.evaluate.envs import make_env
from flexor.launch.ssh.host import SshHost
from flexor.sim import record
from flexor.train.checkpoint.resume import may_change
from flexor.train.ranks.split import split_batch
from support.examples import as_new_policy
from support.limits import LIMIT_S
from support.quick_flexor import TINY_POLICY, shrink
from support.warm_python import WarmPython

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path, language: str) -> Iterator[tuple[list[str], list[str]]]:
    """The words of each line that starts `flexor`: those of a launcher before it, if there is one, and its own."""
    for block in blocks(page, language):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                del words[0]
            if words[:1] == ["flexor"]:
                yield [], words[1:]
            elif "flexor" in words and words[words.index("flexor") - 1] == "-m":
                cut = words.index("flexor")
                yield words[: cut - 1], words[cut + 1 :]


# --- commands that run


def write_files(page: Path, folder: Path) -> None:
    for block in blocks(page, "python"):
        if name := re.match(r"# (\w+\.py)\n", block):
            (folder / name[1]).write_text(block)


def run_page(page: Path, folder: Path, path: Path) -> None:
    write_files(page, folder)
    script = "\n".join(["set -euo pipefail", *blocks(page, "bash")])
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{path}{os.pathsep}{os.environ['PATH']}",
            "FLEXOR_CACHE": str(path.parent / "cache"),
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{name_of(page)}:\n{script}\n\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for PATH with a `flexor` in it, and what stands behind that; beside it a cache with a small
    `builtin/place`, which would be recorded in half a minute.
    """
    folder = tmp_path_factory.mktemp("docs")
    demonstrations = record.record_dataset(folder / "demonstrations", episodes=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "record_dataset", lambda root, **_: shutil.copytree(demonstrations, root))
        record.ensure_builtin_dataset(folder / "cache/datasets", **record.BUILTIN["builtin/place"])
    warm = WarmPython(functools.partial(shrink, demonstrations=str(demonstrations)))
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    script = bin_folder / "flexor"
    script.write_text(f'#!/bin/sh\nexec {warm.python} -m flexor "$@"\n')
    script.chmod(0o755)
    yield bin_folder
    warm.close()


@pytest.fixture(scope="module")
def followed_readme(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which somebody has followed the README."""
    folder = tmp_path_factory.mktemp("readme")
    run_page(README, folder, path)
    return folder


@pytest.mark.slow
@pytest.mark.ranks(waits=True)
def test_readme_does_what_it_says(followed_readme):
    run = followed_readme / "runs/place"
    config = load_config([f"--config={run / 'config.yaml'}"])
    assert config.policy.type == "act" and str(config.dataset.root).endswith("/data/place")
    saved = sorted(folder.name for folder in (run / "checkpoints").iterdir())
    assert saved == ["000002", "000003", "last"]
    assert len(list((followed_readme / "videos").glob("*.mp4"))) == 2
    tree = next(block for block in blocks(README, "text") if block.startswith("runs/place/"))
    for file in ("config.yaml", "metrics.jsonl", "pretrained_model", "training_state", "last"):
        assert file in tree and any(run.rglob(file)), file


def _link(source: str, target: str) -> None:
    """Weights need no copy: they are replaced, never written to."""
    (os.link if source.endswith(".safetensors") else shutil.copy2)(source, target)


@pytest.mark.slow
@pytest.mark.ranks(waits=True)
@pytest.mark.parametrize(
    "page", [p for p in PAGES if p != README and blocks(p, "bash")], ids=lambda page: page.stem
)
def test_commands_work(page, followed_readme, path, tmp_path):
    for folder in ("data", "runs"):
        shutil.copytree(followed_readme / folder, tmp_path / folder, symlinks=True, copy_function=_link)
    run_page(page, tmp_path, path)


@pytest.mark.slow
@pytest.mark.ranks(waits=True)
def test_checkpoint_holds_the_files_named(followed_readme):
    named = re.findall(r"[\w]+\.(?:json|safetensors)", blocks(ROOT / "docs/checkpoints.md", "text")[0])
    files = {p.name for p in (followed_readme / "runs/place/checkpoints/last").rglob("*") if p.is_file()}
    assert files == {*named} - {
        "raw_model.safetensors",
        "ema_state.safetensors",
        "rng_state_ranks.safetensors",
        "statistics_by_dataset.safetensors",
    }


# --- commands that can't run here


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, marks=[pytest.mark.installed] if "\nflexor launch" in p.read_text() else [])
        for p in PAGES
    ],
    ids=lambda page: page.stem,
)
def test_other_commands_parse(page, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "evaluate_policy", lambda path, settings, *_: (parses_eval(settings), ""))
    pushed = {"files": 1, "uploaded_files": 1, "url": "", "tag": ""}
    monkeypatch.setattr("flexor.data.push.push.push_dataset", lambda *_: pushed)
    monkeypatch.setattr("flexor.cli.push.push_run", lambda _: ({}, ""))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(SshHost, "run", None)  # these hosts are examples
    for launcher, (verb, *words) in commands(page, "console"):
        parses_launcher(launcher)
        words = [word for word in words if not word.startswith(("--gpus=", "--resume=auto"))]
        words = [new_policy_of_example(word, tmp_path) for word in words]
        if verb == "train":
            load_config(with_types(words))
        elif verb == "resume":
            assert all(may_change(key) for key in parse_flags(words[1:])), words
        elif verb == "launch":
            tiny = [f"--policy.{k}={v}" for k, v in TINY_POLICY.items()] if words[0] == "hf-jobs" else []
            assert (
                cli.main([verb, words[0], "--dry-run", *with_types(words[1:]), *tiny]) == 0
            )  # which may plan
        elif verb == "plan":
            _, settings = plan_flags().parse_known_args(words)
            load_config([*settings, "--dataset.repo_id=planned/dataset"])
        elif verb == "ui":
            ui_flags().parse_args(words)
        elif verb in ("eval", "push") or (verb, words[0]) == ("data", "push"):
            assert cli.main([verb, *words]) == 0
        elif verb == "serve":
            assert all(word.startswith("--policy.") for word in serve_flags().parse_known_args(words)[1])
        elif verb == "collect":
            assert all(
                word.startswith(("--env.", "--rl.")) for word in collect_flags().parse_known_args(words)[1]
            )
        elif verb == "export":
            assert "--records=data/collected" in words
        elif verb == "demo":
            packaged = "sac_place" if "--rl" in words else "demo"
            settings = [w for w in words if w != "--rl" and not w.startswith("--output-dir")]
            load_config([f"--config={packaged}", *settings])
        else:
            pytest.fail(f"flexor {verb}: use a bash block, it can run here")


def new_policy_of_example(word: str, folder: Path) -> str:
    name = word.removeprefix("--config=examples/")
    return word if name == word else f"--config={as_new_policy(ROOT / 'examples' / name, folder)}"


def with_types(words: list[str]) -> list[str]:
    """Published policies, such as lerobot/pi0_base, as new ones of their type, which parse without a network."""
    typed = [
        re.sub(r"^--policy\.path=lerobot/([a-z0-9]+)[_-].*", r"--policy.type=\1", word) for word in words
    ]
    return [word for word in typed if not word.startswith("--policy.path")]


def parses_eval(settings: list[str]) -> dict[str, str]:
    """`flexor eval`'s settings are a part of those of training."""
    load_config(["--config=demo", *[word for word in settings if not word.startswith("--policy.")]])
    return {}


def parses_launcher(words: list[str]) -> None:
    if words[:1] == ["torchrun"]:
        from torch.distributed.run import get_args_parser

        get_args_parser().parse_args([*words[1:], "-m", "flexor"])
    elif words[:2] == ["accelerate", "launch"]:
        from accelerate.commands.launch import launch_command_parser

        launch_command_parser().parse_args([*words[2:], "-m", "flexor"])
    else:
        assert words in ([], ["srun", "--ntasks-per-node=4", "--gpus-per-node=4", "python"]), words


# --- what pages say about the code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        file_linked = (page.parent / file) if file else page
        assert file_linked.exists(), f"{name_of(page)}: {target}"
        if heading:
            headings = re.findall(r"^#+ (.*)$", file_linked.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings]
            assert heading in anchors, f"{name_of(page)}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_named_exist(page):
    for name in re.findall(r"`((?:src|tests|scripts|docs)/[\w/.]+)`", page.read_text()):
        assert "NAME" in name or (ROOT / name).exists(), f"{name_of(page)}: {name}"


def test_the_map_is_what_the_modules_say():
    """`python scripts/make_map.py` writes it."""
    command = [sys.executable, ROOT / "scripts/make_map.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_verb_has_a_page():
    elsewhere = {"completion": "terminal"}
    documented = {verb for verb in cli.VERBS if (ROOT / "docs" / f"{elsewhere.get(verb, verb)}.md").is_file()}
    assert documented == {*cli.VERBS}
    pages = {page.name for page in PAGES if page.parent.name == "docs"} - {"index.md"}
    for listing, prefix in ((README, "docs/"), (ROOT / "docs/index.md", "")):
        text = listing.read_text()
        assert {page for page in pages if f"]({prefix}{page})" not in text} == set(), name_of(listing)


def test_readme_and_index_have_the_same_groups():
    links = README.read_text().partition("## Documentation\n")[2].partition("\nTo change the code")[0]
    groups = links.strip().replace("](docs/", "](")
    assert groups and groups in (ROOT / "docs/index.md").read_text()


def test_train_page_names_every_group():
    text = (ROOT / "docs/train.md").read_text()
    assert [group for group in GROUPS if f"| `{group}` |" not in text] == []


def test_data_page_names_every_kind_of_problem():
    source = "".join(p.read_text() for p in (ROOT / "src/flexor/data").glob("*.py"))
    kinds = set(re.findall(r"(?:error|warning|say)\(\s*\"([a-z-]+)\"", source))
    text = (ROOT / "docs/data.md").read_text()
    assert {kind for kind in kinds if f"`{kind}`" not in text} == set()


def test_resume_page_names_what_may_change():
    from flexor.train.checkpoint.resume import CHANGEABLE

    text = (ROOT / "docs/resume.md").read_text()
    assert {key for key in CHANGEABLE if f"`{key.removesuffix('.*')}`" not in text} == {"output_dir"}


@pytest.mark.parametrize("where", ["local", "slurm", "hf-jobs"])
def test_launch_page_names_every_flag(where, capsys):
    with pytest.raises(SystemExit):
        cli.main(["launch", where, "--help"])
    flags = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    section = (ROOT / "docs/launch.md").read_text().partition(f"\n## {where}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`--.*?`) \|", section, re.MULTILINE)
    assert {flag.strip("`") for row in rows for flag in row.split(", ")} == flags - {"--dry-run", "--json"}


def test_plan_page_names_every_flag():
    flags = set(re.findall(r"^  (--[a-z-]+)", plan_flags().format_help(), re.MULTILINE))
    rows = re.findall(r"^\| (`--.*?`) \|", (ROOT / "docs/plan.md").read_text(), re.MULTILINE)
    assert {flag.strip("`") for row in rows for flag in row.split(", ")} == flags


def test_serve_page_names_every_flag_and_option():
    from flexor.serve.options import RequestOptions

    flags = set(re.findall(r"^  (--[a-z-]+)", serve_flags().format_help(), re.MULTILINE))
    text = (ROOT / "docs/serve.md").read_text()
    rows = re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
    named = {name.strip("`") for row in rows for name in row.split(", ")}
    assert named >= flags and {name for name in named if name.startswith("--")} == flags
    assert named >= {field.name for field in fields(RequestOptions)}


@pytest.mark.parametrize("measured", ["step", "policy", "serve"])
def test_bench_page_names_every_flag(measured, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", measured, "--help"])
    flags = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    section = (
        (ROOT / "docs/bench.md")
        .read_text()
        .partition(f"\n## flexor bench {measured}\n")[2]
        .partition("\n## ")[0]
    )
    rows = re.findall(r"^\| (`--.*?`) \|", section, re.MULTILINE)
    assert {flag.strip("`") for row in rows for flag in row.split(", ")} == flags


def test_multi_gpu_page_says_what_the_code_does():
    text = (ROOT / "docs/multi_gpu.md").read_text()
    for field in fields(ParallelConfig):
        assert f"--parallel.{field.name}" in text
    assert f"`--parallel.timeout_s`, {ParallelConfig().timeout_s:g} seconds" in text
    assert [name for name in SHARDING if f"`{name}`" not in text] == []
    told = re.search(r"losses within (\S+) of each other, weights within (\S+),", text)
    sameness = (ROOT / "tests/distributed/test_sameness.py").read_text()
    assert told and list(told.groups()) == re.findall(r"^\w+_TOLERANCE = (\S+)", sameness, re.MULTILINE)


def test_multi_gpu_page_splits_batches_as_the_code_does():
    text = (ROOT / "docs/multi_gpu.md").read_text()
    _, words = next(
        command
        for command in commands(ROOT / "docs/multi_gpu.md", "console")
        if "--global_batch_size=64" in command[1]
    )
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert len(rows) == 4
    for processes, batch, accumulation in rows:
        split = split_batch(load_config([w for w in words[1:] if not w.startswith("--gpus")]), int(processes))
        assert (split.batch_size, split.accumulation) == (int(batch), int(accumulation))


def test_record_page_has_the_defaults(monkeypatch):
    defaults: dict = {}
    monkeypatch.setattr(record, "record_dataset", lambda root, **settings: defaults.update(settings))
    assert cli.main(["record", "anywhere"]) == 0
    del defaults["progress"]
    text = (ROOT / "docs/record.md").read_text()
    rows = dict(re.findall(r"^\| `--([\w-]+)` \| `?([\w.]+)`? \|", text, re.MULTILINE))
    assert rows == {name.replace("_", "-"): str(value) for name, value in defaults.items()}
    shared = {k: v for k, v in asdict(record.RecordSettings()).items() if k in defaults}
    assert shared == defaults, "builtin/place is not what `flexor record` makes, as the page says it is"
    assert make_env("place").unwrapped.image_size == defaults["image_size"]


def test_policies_page_has_the_demos_settings():
    demo = flatten(read_file("demo"))
    text = (ROOT / "docs/policies.md").read_text().partition("## The demo's configuration")[2]
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \|", text, re.MULTILINE)
    assert len(rows) > 5
    for names, values in rows:
        keys = [key if "." in key else f"policy.{key}" for key in names.replace("`", "").split(", ")]
        told = values.split(", ") if ", " in values else [values] * len(keys)
        assert told == [json.dumps(demo[key]).strip('"') for key in keys]
    size = record.RecordSettings().image_size
    assert f"| pictures | {size} x {size} |" in text


def test_train_page_has_the_table_of_lerobots_settings():
    assert lerobot_table() in (ROOT / "docs/train.md").read_text(), "run `python tests/test_docs.py`"


def test_pictures_are_small():
    for picture in (ROOT / "docs/images").iterdir():
        assert picture.stat().st_size < (160_000 if picture.suffix == ".gif" else 150_000), picture


def lerobot_table() -> str:
    """How each setting of LeRobot's is treated, from config.py."""
    rows = [(f"`{theirs}`", f"the same as `{ours}`", "") for theirs, ours in _aliases()]
    rows.append(("`policy.use_amp`", "the same as `precision=bf16`", "unless `precision` is given"))
    rows += [(f"`{theirs}`", f"the same as `{ours}`", when) for theirs, (ours, when) in TRANSLATED.items()]
    for key, reason in IGNORED.items():
        rows.append((f"`{key}`", _treatment(key), reason))
    return "\n".join(
        ["| Setting | Here | Why |", "| --- | --- | --- |", *(f"| {a} | {b} | {c} |" for a, b, c in rows)]
    )


def _aliases() -> Iterator[tuple[str, str]]:
    for theirs, ours in ALIASES.items():
        if theirs not in ("policy.path", "checkpoint.async"):  # ours, under another name than inside
            yield theirs, ours


def _treatment(key: str) -> str:
    if key == "resume":
        return "`true` needs `config_path`"  # the command line turns it into `flexor resume`
    for name, values in HARMLESS.items():
        if name == key or name.startswith(f"{key}."):
            setting = "" if name == key else f"`{name.removeprefix(f'{key}.')}` "
            return f"{setting}only " + " or ".join(
                f"`{json.dumps(value).strip(chr(34))}`" for value in values
            )
    return "no effect"


if __name__ == "__main__":
    print(lerobot_table())
