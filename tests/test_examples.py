"""examples/: every file is a complete set of settings, every policy and every robot of the README has one."""

import json
import re
from pathlib import Path

import pytest

from flexor.config.parse import load_config
from flexor.policies import ONLINE_POLICIES, POLICIES
from support.examples import FOLDER, as_new_policy, policy_of

ROOT = Path(__file__).parents[1]
FILES = sorted(FOLDER.glob("*.yaml"))
BUILTIN = sorted((ROOT / "src/flexor/config/builtin").glob("*.yaml"))
ROBOTS = ("so100", "so101", "lekiwi", "aloha", "droid", "libero", "pusht")


def first_line(file: Path) -> str:
    return file.read_text().splitlines()[0].removeprefix("# ")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_settings_are_complete(file: Path, tmp_path: Path):
    config = load_config([f"--config={as_new_policy(file, tmp_path)}"])
    assert config.job_name == file.stem and config.policy.type == policy_of(file)
    assert config.dataset.repo_id and config.steps % config.save_freq == 0
    assert file.name.startswith((*ROBOTS, "xarm"))


def test_every_policy_and_robot_has_one():
    assert {policy_of(file) for file in (*FILES, *BUILTIN)} == {*POLICIES, *ONLINE_POLICIES}
    assert {robot for robot in ROBOTS if not any(file.name.startswith(robot) for file in FILES)} == set()


def test_the_readme_lists_all_of_them():
    text = (FOLDER / "README.md").read_text()
    rows = dict(re.findall(r"^\| \[`([\w.]+)`\]\([\w./]+\) \| (.*) \|$", text, re.MULTILINE))
    described = {file.name: first_line(file) for file in FILES}
    described |= {file.name: re.split(r"[.:](?: |$)", first_line(file))[0] for file in BUILTIN}
    assert rows == described, "the table has the first line of each file"


# --- the notebook


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    """Its cells, one after the other, with fewer episodes and steps."""
    notebook = json.loads((FOLDER / "first_policy.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells), "clear the outputs before a commit"
    code = "\n\n".join("".join(cell["source"]) for cell in cells)
    for many, few in (
        ("EPISODES = 50", "EPISODES = 2"),
        ("STEPS = 600", "STEPS = 2"),
        ("n_episodes=20", "n_episodes=2"),
    ):
        assert code.count(many) == 1
        code = code.replace(many, few)
    (tmp_path / "IPython").mkdir()  # what Jupyter has
    (tmp_path / "IPython/__init__.py").touch()
    (tmp_path / "IPython/display.py").write_text("display = IFrame = Video = lambda *_, **__: None\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "first_policy.ipynb", "exec"), {"__name__": "first_policy"})
    printed = capsys.readouterr().out
    assert (tmp_path / "report.html").is_file() and "RTX 4090" in printed and "success" in printed
    assert len(list((tmp_path / "videos").glob("*.mp4"))) == 2
