"""The command line as a person uses it: every verb, its help, its JSON, its exit codes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flexor import __version__
from flexor.cli.main import VERBS, main
from flexor.config import parse
from support import runs


@pytest.fixture(scope="module")
def run(dataset, tiny_act, tmp_path_factory) -> Path:
    """A run on the recorded task, one step long, with an environment of its own."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    more = ["--env.type=place", "--env.kwargs.image_size=32", "--eval.n_episodes=2", "--env_eval_freq=0"]
    flags = [
        f"--dataset.root={dataset}",
        f"--output_dir={folder}",
        "--steps=1",
        "--batch_size=2",
        "--num_workers=0",
    ]
    assert main(["train", *flags, *tiny_act, *more]) == 0
    return folder


def call(*arguments: str) -> int:
    """The exit code, also where argparse ends the program itself."""
    try:
        return main(list(arguments))
    except SystemExit as end:
        return int(end.code or 0)


def only_json(capsys) -> dict:
    """Standard output is one JSON object on one line and nothing else."""
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


# Flags


def test_a_command_line_is_parsed_once(run, tmp_path, monkeypatch):
    from flexor.plan import advise  # noqa: F401  (it must not import the counting function below)

    parsed = []
    parse_flags = parse.parse_flags
    monkeypatch.setattr(parse, "parse_flags", lambda words: parsed.append(words) or parse_flags(words))
    saved = run / "checkpoints/last/pretrained_model/train_config.json"
    copied = shutil.copytree(run, tmp_path / "run")
    again = [f"--config={run / 'config.yaml'}", f"--output_dir={tmp_path / 'new'}", "--steps=1"]
    for words in (
        ["train", *again],
        ["train", *again, "--resume=auto"],
        ["train", "--resume=true", f"--config_path={copied / saved.relative_to(run)}", "--steps=2"],
        ["resume", str(copied), "--steps=3"],
        ["plan", "--policy.type=act", "--gpu=RTX 4090", "--json"],
        ["launch", "slurm", "--dry-run", "--", "train", *again, "--resume=auto"],
    ):
        parsed.clear()
        assert main(words) == 0, words
        assert len(parsed) == 1, words


# Verbs and help


def test_the_program_alone_names_what_to_do_first(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  flexor {verb}" in text for verb in ("demo", "plan", "train")) and "flexor --help" in text


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["help"]])
def test_usage_names_every_verb(arguments, capsys):
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {verb} " in text for verb in VERBS)


@pytest.mark.parametrize("verb", [*VERBS, "data info", "data check", "data stats"])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_verb_has_help(verb, flag, capsys):
    assert call(*verb.split(), flag) == 0
    out, error = capsys.readouterr()
    assert "usage: flexor" in out and verb.split()[0] in out and error == ""


def test_help_of_a_policy_that_is_not_there(capsys):
    assert call("train", "--policy.type=atc", "--help") == 2
    assert "or act?" in capsys.readouterr().err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"flexor {__version__}\n"


@pytest.mark.parametrize("verb, near", [("trian", "train"), ("evaluate", "eval"), ("docter", "doctor")])
def test_unknown_verb_suggests(verb, near, capsys):
    assert main([verb]) == 2
    assert near in capsys.readouterr().err


def test_module_is_the_program():
    result = subprocess.run([sys.executable, "-m", "flexor", "--version"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, f"flexor {__version__}\n")


@pytest.mark.parametrize(
    "arguments", [["resume"], ["resume", "--steps=3"], ["eval"], ["record"], ["data"], ["data", "x"]]
)
def test_incomplete_commands_exit_with_2(arguments, capsys):
    assert call(*arguments) == 2
    assert "RUN" in (error := capsys.readouterr().err) or "--help` lists all options" in error


# train, resume


def test_train_json(lowdim, tiny_act, tmp_path, capsys):
    folder = tmp_path / "run"
    flags = [
        f"--dataset.root={lowdim}",
        "--output_dir",
        str(folder),
        "--steps=2",
        "--num_workers=0",
        "--log_freq=1",
    ]
    assert main(["train", *flags, *tiny_act, "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert captured.out.count("\n") == 1
    assert result["run"] == str(folder) and result["step"] == 2
    assert result["checkpoint"] == str(folder / "checkpoints" / "000002")
    assert result["metrics"]["loss"] > 0 and result["wall_clock_s"] > 0
    assert main(["resume", str(folder), "--steps=3", "--json"]) == 0
    assert only_json(capsys)["step"] == 3


@pytest.mark.ranks
def test_logs_go_to_standard_error(lowdim, tiny_act, tmp_path):
    flags = [f"--dataset.root={lowdim}", f"--output_dir={tmp_path / 'run'}", "--steps=1", "--num_workers=1"]
    out, error = runs.Forked(tmp_path / "said", "train", *flags, *tiny_act, "--json").end()
    assert json.loads(out)["step"] == 1 and out.count("\n") == 1
    assert "run folder" in error and "saved" in error


def test_resume_as_lerobot_does_it(lowdim, tiny_act, tmp_path, capsys):
    folder = tmp_path / "run"
    flags = [
        f"--dataset.root={lowdim}",
        f"--output_dir={folder}",
        "--steps=2",
        "--num_workers=0",
        "--resume",
        "false",
    ]
    assert main(["train", *flags, *tiny_act]) == 0
    saved = folder / "checkpoints" / "last" / "pretrained_model" / "train_config.json"
    capsys.readouterr()
    assert main(["train", f"--config_path={saved}", "--resume=true", "--steps=3", "--json"]) == 0
    assert only_json(capsys)["step"] == 3
    assert main(["train", "--resume=true"]) == 2
    assert "--config_path" in capsys.readouterr().err
    assert main(["train", "--resume=true", f"--config_path={tmp_path / 'x'}"]) == 2


def test_nothing_is_logged_to_services_that_are_not_there(lowdim, tiny_act, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    flags = [f"--dataset.root={lowdim}", f"--output_dir={tmp_path / 'run'}", "--steps=1", "--wandb.enable"]
    assert main(["train", *flags, *tiny_act]) == 2
    assert "pip install 'flexor[wandb]'" in capsys.readouterr().err


# eval


@pytest.mark.parametrize("where", ["", "checkpoints/last", "checkpoints/000001/pretrained_model"])
def test_eval_takes_the_runs_environment(where, run, capsys):
    assert main(["eval", str(run / where), "--env.max_steps=3", "--json"]) == 0
    result = only_json(capsys)
    assert result["env"] == "place" and 0 <= result["success_rate"] <= 1


def test_eval_repeats_exactly(run, capsys):
    result = []
    for batch in (1, 1, 2):
        assert main(["eval", str(run), "--env.max_steps=5", f"--eval.batch_size={batch}", "--json"]) == 0
        result.append(only_json(capsys))
    assert result[0] == result[1]
    rewards = ("mean_return", "mean_max_reward")  # with another batch size by other kernels, in float32
    assert [result[0][name] for name in rewards] == pytest.approx(
        [result[2][name] for name in rewards], rel=1e-4
    )


@pytest.mark.parametrize("path", [["--policy.path={}"], ["--policy.path", "{}"], ["{}"]])
def test_eval_as_lerobot_does_it(path, run, capsys):
    named = [word.format(run) for word in path]
    more = ["--env.type", "place", "--eval.n_episodes=1", "--eval.batch_size=1", "--env.max_steps", "2"]
    ignored = ["--policy.use_amp=false", "--policy.device=cpu", "--eval.use_async_envs=false"]
    assert main(["eval", *named, *more, *ignored]) == 0
    assert "success" in capsys.readouterr().out


def test_eval_films(run, tmp_path, capsys):
    videos = tmp_path / "videos"
    assert main(["eval", str(run), "--env.max_steps=2", "--videos", str(videos)]) == 0
    assert len(list(videos.glob("*.mp4"))) == 2


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--env.type=nowhere"], "nowhere"),
        (["--env.tpye=place"], "env.type"),
        (["--steps=3"], "steps"),
        (["--eval.n_episodes=x"], "n_episodes"),
        (["--env.kwargs.image_size=64"], "observation.image"),
        (["--policy.device=cuda:99"], "policy.device"),
        (["--policy.dim_model=32"], "does not fit"),
    ],
)
def test_eval_refuses_by_name(flags, named, run, capsys):
    assert call("eval", str(run), *flags) in (1, 2)
    assert named in capsys.readouterr().err


def test_eval_of_nothing(tmp_path, capsys):
    assert main(["eval", str(tmp_path), "--env.type=place"]) == 1
    assert "holds no policy" in capsys.readouterr().err


# record, data


def test_record_then_look_at_it(tmp_path, capsys):
    root = tmp_path / "data"
    assert main(["record", str(root), "--episodes=2", "--image-size=32", "--json"]) == 0
    assert only_json(capsys)["episodes"] == 2
    for verb in ("info", "check", "stats"):
        assert main(["data", verb, str(root), "--json"]) == 0
        assert only_json(capsys)
        assert main(["data", verb, str(root)]) == 0
        assert capsys.readouterr().out.strip()
    good = tmp_path / "good.json"
    assert main(["data", "check", str(root), "--quick", "--good-episodes", str(good)]) == 0
    assert json.loads(good.read_text()) == [0, 1]
    assert call("record", str(root), "--episodes=1") in (1, 2)  # never over another dataset


@pytest.mark.parametrize("flags", [["--episodes=0"], ["--image-size=33"], ["--noise=9"], ["--seed=-1"]])
def test_record_refuses(flags, tmp_path, capsys):
    assert call("record", str(tmp_path / "data"), *flags) == 2
    assert flags[0][2:].split("=")[0].replace("-", "_") in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_stats_can_be_written(tmp_path, capsys):
    root = tmp_path / "data"
    assert main(["record", str(root), "--episodes=1", "--image-size=32"]) == 0
    before = json.loads((root / "meta" / "stats.json").read_text())
    (root / "meta" / "stats.json").unlink()
    assert main(["data", "stats", str(root), "--write"]) == 0
    after = json.loads((root / "meta" / "stats.json").read_text())
    assert after["action"]["mean"] == pytest.approx(before["action"]["mean"], rel=1e-4)


@pytest.mark.parametrize("verb", ["info", "check", "stats"])
def test_data_that_is_not_there(verb, tmp_path, capsys):
    assert main(["data", verb, str(tmp_path / "none")]) == 1
    assert "none" in capsys.readouterr().err


def test_broken_data_exits_with_1(dataset, tmp_path, capsys):
    import shutil

    root = shutil.copytree(dataset, tmp_path / "broken")
    next((root / "data").rglob("*.parquet")).write_bytes(b"nothing")
    assert main(["data", "check", str(root), "--json"]) == 1
    assert only_json(capsys)


# demo


def test_demo_clears_only_a_demo(run, tmp_path, capsys):
    """It starts anew in its own folder, so it must be sure that it is its own."""
    before = sorted(run.rglob("*"))
    assert main(["demo", "--output-dir", str(run)]) == 2
    assert "not a demo" in capsys.readouterr().err and sorted(run.rglob("*")) == before
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["demo", "--output-dir", str(tmp_path)]) == 2
    assert (tmp_path / "notes.txt").exists()


def test_demo_checks_its_settings_before_it_clears(run, tmp_path, capsys):
    import shutil

    folder = shutil.copytree(run, tmp_path / "demo", symlinks=True)
    file = folder / "config.yaml"
    file.write_text(file.read_text().replace("job_name: act", "job_name: demo"))
    for wrong in ("--stpes=3", "--save_checkpoint=false"):
        assert main(["demo", "--output-dir", str(folder), wrong]) == 2
        assert (folder / "checkpoints").exists()


@pytest.mark.slow
def test_demo_from_end_to_end(dataset, tiny_act, tmp_path, capsys):
    folder = tmp_path / "demo"
    small = [
        f"--dataset.root={dataset}",
        "--env.kwargs.image_size=32",
        "--steps=2",
        "--batch_size=2",
        *tiny_act,
    ]
    more = ["--eval.n_episodes=2", "--env.max_steps=3", "--eval.videos=1"]
    for _ in range(2):  # the second finds the first in its place
        assert main(["demo", "--output-dir", str(folder), "--json", *small, *more]) == 0
        result = only_json(capsys)
    assert json.loads((folder / "summary.json").read_text()) == result
    assert {"success_rate", "expert_success_rate", "untrained_success_rate"} <= result.keys()
    assert Path(result["checkpoint"]).is_dir() and Path(result["video"]).is_file()


@pytest.mark.parametrize("verb", ["resume", "watch --once", "report", "data info", "eval --env.type=place"])
def test_a_path_that_no_file_can_have(verb, capsys):
    first, *flags = verb.split()
    words = [first, *flags, "x" * 300] if first == "data" else [first, "x" * 300, *flags]
    assert main(words) == 1
    error = capsys.readouterr().err
    assert "File name too long" in error and error.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"]])
def test_a_reader_that_ends_is_no_error(arguments):
    """As in `flexor --help | head -1`."""
    read, write = os.pipe()
    os.close(read)
    program = [sys.executable, "-c", "import sys; from flexor.cli.main import program; sys.exit(program())"]
    with os.fdopen(write, "w") as closed:
        done = subprocess.run([*program, *arguments], stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
