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
        (("flexor", "train", "--precision", "="), ["auto", "no", "bf16", "fp16", "fp8"]),
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


ZSH = """compdef() {{ }}
compset() {{ PREFIX="${{PREFIX#*=}}" }}
compadd() {{ while [[ "$1" != -- ]]; do shift; done; shift
  for word in "$@"; do if [[ "$word" == "$PREFIX"* ]]; then print -r -- "$word"; fi; done }}
_files() {{ }}
source {script}
words=({words}); CURRENT=$#words; PREFIX="$words[-1]"; _flexor
"""
CASES = [
    (("pl",), ["plan"]),
    (("data", "ch"), ["check"]),
    (("launch", "sl"), ["slurm"]),
    (("watch", "--on"), ["--once"]),
    (("train", "--precision="), ["auto", "bf16", "fp16", "fp8", "no"]),
    (("train", "--policy.type=sa"), ["sac"]),
    (("train", "--policy.train_ex"), ["--policy.train_expert_only"]),
    (("plan", "--gpu=H20"), ["H200"]),
]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_words_are_completed_in_other_shells(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["completion", shell]) == 0
    script, program = tmp_path / "script", shutil.which(shell)
    script.write_text(capsys.readouterr().out)
    assert "policy.train_expert_only" in script.read_text()
    if not program:
        pytest.skip(f"there is no {shell} on this machine")
    for words, expected in CASES:
        quoted = " ".join(map(json.dumps, ("flexor", *words)))
        fish = f"source {script}; complete -C {json.dumps(' '.join(('flexor', *words)))}"
        text = ZSH.format(script=script, words=quoted) if shell == "zsh" else fish
        no_files = ["-f"] if shell == "zsh" else ["--no-config"]
        result = subprocess.run(
            [program, *no_files, "-c", text], capture_output=True, text=True, check=True, cwd=tmp_path
        )
        offered = [line.split("\t")[0].rpartition("=")[2] or line for line in result.stdout.splitlines()]
        assert sorted({word.rstrip("=") for word in offered} - {"script"}) == expected, (shell, words)


def test_help_names_a_command(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["help", "watch"])
    assert "usage: flexor watch" in capsys.readouterr().out
    assert cli.main(["help", "wacth"]) == 2
    assert "Did you mean watch" in capsys.readouterr().err
