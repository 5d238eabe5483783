"""Datasets in the application, in a real browser."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from flexor.data.dataset import open_dataset
from flexor.data.format.episode_list import parse_episodes
from support.browser import Browser, find_browser
from support.run_folders import write_run
from support.ui_pages import check_page, press, serving_ui, text_of

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="there is no Chromium here (FLEXOR_TEST_BROWSER names one)"
)
GOLDEN = Path(__file__).parents[1] / "golden" / "data"
VALUES = "[...document.querySelector('.episode-plots .curves').querySelectorAll('b')].map((e) => e.innerText)"
DRAWN = "document.querySelectorAll('.episode-plots path.curve').length > 0"
CHECKED = "document.querySelector('.episode-view .card:not(:has([role=status]))') !== null"


@pytest.fixture(scope="module")
def browser():
    with Browser(find_browser()) as browser:
        yield browser


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN / "h264", tmp_path / "block")


def test_every_width_light_and_dark(browser: Browser, dataset: Path, tmp_path: Path):
    with serving_ui(tmp_path / "runs", dataset, lists=tmp_path) as server:
        check_page(browser, f"{server.link}#data", f"{DRAWN} && {CHECKED}")


def test_an_episode_plays_and_curves_follow(browser: Browser, dataset: Path, tmp_path: Path):
    opened = open_dataset(root=dataset)
    with serving_ui(dataset, lists=tmp_path) as server:
        browser.open(f"{server.link}#data")
        browser.wait(DRAWN)
        assert browser.run("document.querySelectorAll('.episode-row').length") == len(opened.episodes)
        browser.wait("[...document.querySelectorAll('video')].every((video) => video.readyState >= 2)")
        assert browser.run("document.querySelectorAll('.cameras video').length") == len(opened.cameras)
        # the keyboard: the next episode, a step, and its values at that frame
        press(browser, "ArrowRight")
        state = opened.columns["observation.state"][1]
        values = browser.run(VALUES)
        assert [float(value) for value in values] == pytest.approx(np.ravel(state), rel=1e-3, abs=1e-3)
        browser.run("document.querySelector('.play').click()")
        browser.wait("Number(document.querySelector('.seek').value) >= 3")
        browser.wait("document.querySelector('.play').innerText === 'Play'")  # it ends with the episode
        length = int(opened.episodes.length[0])
        assert browser.run("Number(document.querySelector('.seek').value)") == length - 1
        assert browser.errors == []


def test_a_video_that_browsers_do_not_play_is_encoded_again(browser: Browser, dataset: Path, tmp_path: Path):
    with serving_ui(dataset, lists=tmp_path) as server:
        browser.open(f"{server.link}#data")
        browser.wait(DRAWN)
        browser.run("document.querySelector('video').dispatchEvent(new Event('error'))")
        browser.wait("document.querySelector('video').src.includes('episode-clip')")
        browser.wait("document.querySelector('video').readyState >= 2")
        opened = open_dataset(root=dataset)
        seconds = float(opened.episodes.length[0]) / opened.fps
        assert browser.run("document.querySelector('video').duration") == pytest.approx(
            seconds, abs=1.5 / opened.fps
        )


def test_episodes_to_leave_out_are_a_list_that_training_takes(
    browser: Browser, dataset: Path, tmp_path: Path
):
    index = open_dataset(root=dataset).episodes.index.tolist()
    with serving_ui(dataset, lists=tmp_path) as server:
        browser.open(f"{server.link}#data")
        browser.wait(DRAWN)
        browser.run("document.activeElement.blur()")
        press(browser, "x")
        browser.wait("document.querySelector('.exclude-bar code') !== null")
        assert text_of(browser, ".exclude-bar code") == "--dataset.exclude_episodes=@exclude-block.json"
        path = tmp_path / "exclude-block.json"
        browser.wait("document.querySelector('.episode-row.out') !== null")
        assert parse_episodes(f"@{path}", "list") == index[:1]
        assert open_dataset(root=dataset, exclude_episodes=f"@{path}").episodes.index.tolist() == index[1:]
        browser.open(f"{server.link}#data")  # and it is still marked
        browser.wait("document.querySelector('.episode-row.out') !== null")
        assert browser.errors == []


def test_what_the_check_found_is_at_its_frame(browser: Browser, dataset: Path, tmp_path: Path):
    table = next((dataset / "data").rglob("*.parquet"))
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = pq.read_table(table)
    actions = rows["action"].to_pylist()
    actions[2] = [float("nan")] * len(actions[2])
    column = pa.array(actions, rows.schema.field("action").type)
    pq.write_table(
        rows.set_column(rows.schema.get_field_index("action"), rows.schema.field("action"), column), table
    )
    with serving_ui(dataset, lists=tmp_path) as server:
        browser.open(f"{server.link}#data")
        browser.wait("document.querySelector('.finding-button') !== null")
        assert "frame 2" in text_of(browser, ".finding-button")
        browser.run("document.querySelector('.finding-button').click()")
        assert browser.run("Number(document.querySelector('.seek').value)") == 2
        assert text_of(browser, ".episode-row .warn").strip() == "▲" and browser.errors == [], (
            browser.requests
        )


def test_a_frame_as_a_policy_sees_it(browser: Browser, dataset: Path, tmp_path: Path):
    data = {"repo_id": "me/block", "root": str(dataset)}
    write_run(tmp_path / "runs/mine", settings={"dataset": data, "policy": {"type": "act"}})
    settings = "--dataset.image_transforms.enable=true"
    with serving_ui(tmp_path / "runs", dataset, lists=tmp_path) as server:
        browser.open(f"{server.link}#runs")
        browser.wait("document.querySelector('.run-facts') !== null")  # the run was read
        browser.run(f"remember('sample', {json.dumps({'run': '', 'policy': 'act', 'settings': settings})})")
        browser.open(f"{server.link}#data")
        browser.wait(DRAWN)
        browser.run("document.querySelector('.sample').closest('details').open = true")
        images = "[...document.querySelectorAll('.sample-images img')].filter((e) => e.naturalWidth)"
        cameras = len(open_dataset(root=dataset).cameras)
        browser.wait(f"{images}.length === {5 * cameras}")  # recorded, three steps, and when it acts
        assert "augmented: brightness" in text_of(browser, ".sample")
        sources = browser.run(f"{images}.slice(0, 5).map((e) => e.src)")
        assert sources[0] == sources[4] and len({*sources}) == 4
        assert "observation.state" in text_of(browser, ".sample table")
        options = browser.run("[...document.querySelector('.card select').options].map((e) => e.text)")
        assert options[:2] == ["run mine", "a new act"]
        refused = (
            "policy=act&settings=--dataset.root%3D/",
            "policy=act&settings=--policy.type%3Dx.py:X",
            "policy=x.py:X",
            "run=none",
            "frame=9999999&policy=act",
        )
        for query in refused:
            path = f"/sample/{browser.run('location.hash').split('/')[1]}/0?{query}"
            assert browser.run(f"fetch('{path}').then((reply) => reply.status)") in (400, 404), query


def test_datasets_of_runs_are_offered_and_nothing_else(browser: Browser, dataset: Path, tmp_path: Path):
    write_run(tmp_path / "runs/one", settings={"dataset": {"repo_id": "me/block", "root": str(dataset)}})
    with serving_ui(tmp_path / "runs", lists=tmp_path) as server:
        browser.open(f"{server.link}#runs")
        browser.wait("document.querySelector('.run-facts') !== null")
        browser.open(f"{server.link}#data")
        browser.wait(DRAWN)
        assert text_of(browser, "aside h1") == "block"
        ask = "fetch('/episode-video/{}').then((r) => r.status)"
        dataset_id = browser.run("location.hash.split('/')[1]")
        for path in (
            f"{dataset_id}/0/..%2F..%2Fmeta",
            f"{dataset_id}/99999/observation.images.top",
            "nothing/0/x",
        ):
            assert browser.run(ask.format(path)) == 404


def test_without_a_dataset_the_page_says_how_to_name_one(browser: Browser, tmp_path: Path):
    with serving_ui(tmp_path, lists=tmp_path) as server:
        browser.open(f"{server.link}#data")
        browser.wait("document.querySelector('.empty') !== null")
        assert "flexor ui runs path/to/dataset" in text_of(browser, ".command") and browser.errors == []


def test_fifty_thousand_episodes_draw_a_few_rows(browser: Browser, dataset: Path, tmp_path: Path):
    with serving_ui(dataset, lists=tmp_path) as server:
        browser.open(f"{server.link}#data")
        browser.wait(DRAWN)
        count = 50_000
        data = {
            "episodes": [*range(count)],
            "lengths": [10] * count,
            "episode_tasks": [0] * count,
            "tasks": ["t"],
            "id": "x",
            "name": "large",
            "folder": "/large",
            "fps": 10,
            "frames": 500_000,
            "version": "v3.0",
            "curves": [],
            "cameras": [],
            "excluded": [],
            "list": "l",
        }
        browser.run("document.getElementById('place').replaceChildren()")
        browser.run(f"new EpisodesView(document.getElementById('place'), [{{}}], {json.dumps(data)}, 0) && 1")
        assert browser.run("document.querySelectorAll('.episode-row').length") < 100
        browser.run("document.querySelector('.episode-list').scrollTop = 46 * 40000")
        browser.wait("document.querySelector('#row-40000') !== null")
        assert "50,000 episodes" in text_of(browser, "aside .side-head")
