"""`flexor eval --open_loop` on runs: which episodes it takes, its figures, its page, and what it refuses."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from flexor.cli.main import main
from flexor.data.dataset import open_dataset
from flexor.evaluate.open_loop.open_loop import run_open_loop
from flexor.policies.pretrained import load_pretrained
from support import runs
from support.browser import Browser, find_browser
from support.small_policies import small_flags
from support.ui_pages import check_page


@pytest.fixture(scope="module")
def act(dataset, tiny_act, tmp_path_factory) -> Path:
    """A run that held out the last of four episodes."""
    flags = [*tiny_act, "--steps=2", "--dataset.eval_split=0.25"]
    return runs.train(dataset, tmp_path_factory.mktemp("open_loop") / "act", flags)


def evaluate(capsys, *words: str) -> dict:
    assert main(["eval", *words, "--open_loop", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def page_data(file: Path) -> dict:
    return json.loads(re.search(r'id="page-data">(.*?)</script>', file.read_text(), re.DOTALL)[1])


def test_held_out_episodes_are_taken_and_the_page_has_the_same_figures(act, capsys, tmp_path):
    page = tmp_path / "page.html"
    result = evaluate(capsys, str(act), "--samples=12", f"--output={page}")
    assert result["episodes"] == [3] and result["note"] == ""
    assert result["joints"] == ["x", "y", "opening"]
    assert {*result["baselines"]} == {"hold still", "repeat the last action", "mean of the task"}
    assert np.shape(result["errors"]["step"]) == (result["steps"], 3)
    assert {part["input"] for part in result["inputs"]} >= {
        "observation.image",
        "state",
        "words",
        "all inputs",
    }
    data = page_data(page)
    assert data["score"] == result["score"] and data["verdicts"] == result["verdicts"]
    (episode,) = data["episode_curves"]
    recorded = open_dataset(root=result["dataset"]).select([3]).columns["action"]
    np.testing.assert_allclose(np.array(episode["recorded"]).T, recorded, rtol=1e-4, atol=1e-5)
    assert episode["image"] and len(episode["chunks"]) == result["samples"]


def test_the_page_opens_in_a_browser_without_errors_or_requests(act, capsys, tmp_path):
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium on this machine: install the package chromium, or set FLEXOR_TEST_BROWSER")
    page = tmp_path / "page.html"
    result = evaluate(capsys, str(act), "--samples=12", f"--output={page}")
    with Browser(program) as browser:
        browser.open(page)
        browser.run("document.querySelector('article').scrollIntoView()")
        browser.wait("document.querySelectorAll('article .joint path').length > 0")
        rows = browser.run("[...document.querySelectorAll('[data-row]')].map(row => row.dataset.row)")
        assert rows == ["policy", *result["baselines"]]
        kinds = browser.run("[...document.querySelectorAll('.verdict code')].map(code => code.textContent)")
        assert kinds == [verdict["kind"] for verdict in result["verdicts"]]
        assert browser.run("document.querySelectorAll('.lines').length") == 3  # joints
        assert not browser.errors and browser.requests == [page.as_uri()]
        check_page(browser, page.as_uri(), "document.querySelectorAll('article').length > 0")


def test_the_terminal_says_the_same(act, capsys, tmp_path):
    words = ["eval", str(act), "--open_loop", "--samples=12", f"--output={tmp_path / 'page.html'}"]
    assert main(words) == 0
    text = capsys.readouterr().out
    result = evaluate(capsys, *words[1:2], *words[3:])
    assert "The policy does not beat all baselines." in text
    assert all(
        name in text for name in ("hold still", "repeat the last action", "mean of the task", "opening")
    )
    assert all(verdict["message"] in text for verdict in result["verdicts"])


def test_a_policy_that_has_learned_nothing_is_worse_than_a_baseline(act, capsys, tmp_path):
    result = evaluate(capsys, str(act), "--samples=12", f"--output={tmp_path / 'page.html'}")
    assert not result["beats_all_baselines"]
    assert "no-better-than-a-baseline" in [verdict["kind"] for verdict in result["verdicts"]]


def test_named_episodes_and_other_datasets(act, dataset, capsys, tmp_path):
    words = ["--samples=6", "--errors_only", f"--output={tmp_path / 'page.html'}"]
    assert evaluate(capsys, str(act), *words, "--dataset.episodes=0,2")["episodes"] == [0, 2]
    other = evaluate(capsys, str(act), *words, f"--dataset.root={dataset}")
    assert other["episodes"] == [0, 1, 2, 3] and other["inputs"] == []


def test_predictions_are_those_of_the_policy_and_errors_those_of_the_record(act, dataset):
    """The figures, computed again with nothing of the module."""
    policy = load_pretrained(str(act))
    data = open_dataset(root=dataset)
    result = run_open_loop(policy, data, count=8, inputs=False)
    rows = result.samples.rows
    batch = data.read(rows, {"action": range(4)})
    inputs = {name: batch[name] for name in ("observation.image", "observation.state")}
    predicted = policy.chunk(inputs, batch["task"])
    np.testing.assert_allclose(result.predicted, predicted, atol=1e-5)
    error = np.where(batch["action_is_pad"][..., None], np.nan, np.abs(predicted - batch["action"]))
    np.testing.assert_allclose(result.target.step_errors(result.predicted), np.nanmean(error, 0), atol=1e-5)
    score = np.nanmean(np.nanmean(error / data.columns["action"].std(0), axis=(1, 2)))
    np.testing.assert_allclose(result.score, score, atol=1e-5)


def test_policies_with_several_observations_and_words(dataset, tmp_path, capsys):
    for name in ("diffusion", "multi_task_dit"):
        flags = small_flags(name, tmp_path / f"{name}-files")
        run = runs.train(dataset, tmp_path / name, flags, "--steps=1", "--policy.n_obs_steps=2")
        capsys.readouterr()
        result = evaluate(capsys, str(run), "--samples=4", f"--output={tmp_path / 'page.html'}")
        moved = {part["input"]: part["moved"] for part in result["inputs"]}
        assert moved["state"] > 0 and (moved["words"] > 0) == (name == "multi_task_dit")
        assert "sign-flipped" not in [verdict["kind"] for verdict in result["verdicts"]]  # of four samples


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--samples=0"], "at least one"),
        (["--optimizer.lr=1"], "unknown setting optimizer.lr"),
        (["--dataset.rot=x"], "dataset.rot"),
    ],
)
def test_mistakes_are_named(act, words, text, capsys, tmp_path):
    assert main(["eval", str(act), "--open_loop", f"--output={tmp_path / 'page.html'}", *words]) == 2
    assert text in capsys.readouterr().err


def test_a_policy_of_unknown_data_needs_a_dataset(act, tmp_path, capsys):
    folder = tmp_path / "policy"
    folder.mkdir()
    for file in (act / "checkpoints/last/pretrained_model").iterdir():
        if file.name != "train_config.json":
            (folder / file.name).write_bytes(file.read_bytes())
    assert main(["eval", str(folder), "--open_loop", f"--output={tmp_path / 'page.html'}"]) == 2
    assert "--dataset.root" in capsys.readouterr().err
