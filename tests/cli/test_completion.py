"""Completion in a real shell."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from flexor.cli import main as cli
from flexor.cli.main import VERBS

TRY = """source {script}
try() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); COMPREPLY=(); _flexor 2>/dev/null; echo "${{COMPREPLY[@]}}"; }}
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "flexor.bash"
    from flexor.cli.completion import SHELLS, all_options

    path.write_text(SHELLS["bash"](all_options()))
    return path


def completed(script: Path, *words: str) -> list[str]:
    command = TRY.format(script=script) + "try " + " ".join(map(json.dumps, words))
    bash = shutil.which("bash")
    assert bash
    result = subprocess.run([bash, "-c", command], capture_output=True, text=True, check=True)
    return result.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("flexor", "pl"), ["plan"]),
        (("flexor", "data", "ch"), ["check"]),
        (("flexor", "watch", "--on"), ["--once"]),
        (("flexor", "watch", "--ev"), ["--every="]),
        (("flexor", "train", "--precision", "="), ["auto", "no", "bf16", "fp16"]),
        (("flexor", "train", "--policy.type", "=", "pi0"), ["pi0", "pi05", "pi0_fast"]),
        (("flexor", "train", "--policy.train_ex"), ["--policy.train_expert_only="]),
        (("flexor", "plan", "--ema.enable", "=", "t"), ["true"]),
        (("flexor", "plan", "--gpu", "=", "H20"), ["H200"]),
    ],
)
def test_words_are_completed(script: Path, words: tuple[str, ...], expected: list[str]):
    assert completed(script, *words) == expected


def test_all_commands_are_offered(script: Path):
    assert completed(script, "flexor", "") == [*VERBS]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_for_other_shells_are_valid(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert "--policy.type" in out or "policy.type" in out
    program = shutil.which(shell)
    if program:
        (tmp_path / "script").write_text(out)
        subprocess.run([program, "-n", str(tmp_path / "script")], check=True)


def test_help_names_a_command(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["help", "watch"])
    assert "usage: flexor watch" in capsys.readouterr().out
    assert cli.main(["help", "wacth"]) == 2
    assert "Did you mean watch" in capsys.readouterr().err
