"""The page of a dataset in a real browser, and its size."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flexor.cli import main as cli
from flexor.core.errors import ConfigError, DatasetError
from flexor.data.check.report import CheckReport
from flexor.data.dataset import Dataset, Episodes, open_dataset
from flexor.data.format.writer import DatasetWriter
from flexor.data.show.budget import PAGE_BYTES, TEXT_BYTES, page_budget
from flexor.data.show.page import SCRIPTS, STYLES, frame_marks, page_data, show_dataset
from flexor.data.show.strips import with_marked
from flexor.pages.page import page
from support.browser import Browser, find_browser
from support.damage import truncate
from support.faulty_arm import glitch, write_arm
from support.small_datasets import SIDE, STILL, TOP, write
from support.ui_pages import check_page

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'> & \"push\""
AXES = ["height", "width", "channels"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium on this machine: install the package chromium, or set FLEXOR_TEST_BROWSER")
    with Browser(program) as started:
        yield started


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("show") / "sample", still=True)


def written(root: Path, features: dict, lengths: list[int], task: str = "push") -> Path:
    with DatasetWriter(root, 10, features, codec="h264") as writer:
        for episode, length in enumerate(lengths):
            for number in range(length):
                rng = np.random.default_rng([episode, number])
                writer.add_frame({name: _value(spec, rng) for name, spec in features.items()})
            writer.save_episode(task)
    return root


def _value(spec: dict, rng: np.random.Generator) -> np.ndarray:
    if spec["dtype"] in ("video", "image"):
        return np.full(spec["shape"], rng.integers(0, 255), np.uint8)
    return rng.normal(size=spec["shape"]).astype(spec["dtype"])


def vector(size: int, names: list[str] | None = None) -> dict:
    return {"dtype": "float32", "shape": (size,), "names": names}


def camera(height: int, width: int, kind: str = "video") -> dict:
    return {"dtype": kind, "shape": (height, width, 3), "names": AXES}


def opened(browser: Browser, root: Path, file: Path, dark: bool = False, **options: object) -> None:
    """Make the page, open it, and wait until the first episode is drawn."""
    show_dataset(root, file, **options)  # type: ignore[arg-type]
    browser.open(file, dark)
    browser.run("document.querySelector('.episode').scrollIntoView()")
    browser.wait("document.querySelectorAll('.episode .curves svg, .episode .film').length > 0")


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_shows_the_data(browser: Browser, sample: Path, tmp_path: Path, dark: bool):
    opened(browser, sample, tmp_path / "page.html", dark)
    data = open_dataset(root=sample)
    assert browser.run("document.querySelectorAll('.episode').length") == 4
    assert browser.run("document.querySelector('#facts').textContent").startswith("LeRobot v3.0")
    assert browser.run("[...document.querySelectorAll('#episode-0 .curves h4')].map(e => e.textContent)") == [
        "observation.state",
        "action",
        "next.done",
    ]
    # Frame 7 of 12 under the pointer: its values and its images, of all cameras.
    browser.point("#episode-0 .curves svg", 7 / 11)
    legend = browser.run("[...document.querySelectorAll('#episode-0 .legend b')].map(e => e.textContent)")
    exact = [*data.columns["observation.state"][7], *data.columns["action"][7], data.columns["next.done"][7]]
    assert [float(value) for value in legend] == pytest.approx([float(x) for x in exact], abs=1e-4)
    captions = browser.run("[...document.querySelectorAll('#episode-0 figcaption')].map(e => e.textContent)")
    assert captions == [f"{name}, frame 7" for name in (TOP, SIDE, STILL)]
    assert browser.run("getComputedStyle(document.body).backgroundColor") == (
        "rgb(22, 24, 28)" if dark else "rgb(255, 255, 255)"
    )
    browser.run("document.querySelector('.theme').click()")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)" if dark else "rgb(22, 24, 28)"
    )
    assert browser.errors == [] and browser.requests == [(tmp_path / "page.html").as_uri()]


def test_every_width_light_and_dark(browser: Browser, sample: Path, tmp_path: Path):
    opened(browser, sample, tmp_path / "page.html", False)
    address = (tmp_path / "page.html").as_uri()
    check_page(browser, address, "document.querySelectorAll('.curves path').length > 0")


def test_zoom_of_an_episode(browser: Browser, sample: Path, tmp_path: Path):
    opened(browser, sample, tmp_path / "page.html")
    values = open_dataset(root=sample).columns["action"][:, 0]
    second = "#episode-0 .curves:nth-of-type(2)"
    browser.drag("#episode-0 .curves svg", 4 / 11, 8 / 11)  # of the first plot; all of them follow
    for place, frame in ((0.0, 4), (0.5, 6), (1.0, 8)):
        browser.point(f"{second} svg", min(max(place, 0.01), 0.99))
        legend = browser.run(f"document.querySelector('{second} .legend b').textContent")
        assert float(legend) == pytest.approx(float(values[frame]), abs=1e-4)
    assert browser.run("document.querySelector('.selection')") is None
    browser.double_click(f"{second} svg")
    browser.point("#episode-0 .curves svg", 0.99)
    text = browser.run("document.querySelector('#episode-0 .plots > .soft').textContent")
    assert text.startswith("frame 11, 1.10 s") and browser.errors == []


def test_images_on_the_page_are_those_of_the_dataset(browser: Browser, sample: Path, tmp_path: Path):
    opened(browser, sample, tmp_path / "page.html", episodes=[1])
    browser.wait("document.querySelector('.film img').complete")
    # Every eighth pixel, from the middle of its block of the JPEG.
    width, height, values = browser.run("""(() => {
        const image = document.querySelector('.film img');
        const canvas = Object.assign(document.createElement('canvas'), {width: image.width, height: image.height});
        canvas.getContext('2d').drawImage(image, 0, 0);
        const all = canvas.getContext('2d').getImageData(0, 0, image.width, image.height).data;
        const some = [];
        for (let y = 4; y < image.height; y += 8)
            for (let x = 4; x < image.width; x += 8)
                some.push(...all.slice(4 * (y * image.width + x), 4 * (y * image.width + x) + 3));
        return [image.width, image.height, some];
    })()""")
    data = open_dataset(root=sample, episodes=[1])
    assert (height, width) == (3 * 144, len(data) * 216)
    sheet = np.array(values, np.float64).reshape(3, 18, len(data), 27, 3)  # [camera, y, frame, x, channel]
    read = data.read(np.arange(len(data)))
    y, x = ((np.arange(n) * 8 + 4) * 32 // 144 for n in (18, 27))  # the pixel of the frame at that place
    for row, name in enumerate((TOP, SIDE, STILL)):
        exact = read[name].transpose(0, 2, 3, 1)[:, y][:, :, x]  # [frame, y, x, channel]
        assert abs(sheet[row].transpose(1, 0, 2, 3) - exact).mean() < 5


def test_statistics_and_histograms(browser: Browser, sample: Path, tmp_path: Path):
    opened(browser, sample, tmp_path / "page.html")
    row = "document.querySelector('[data-feature=\"action\"]').rows[2]"
    cells = browser.run(f"[...{row}.cells].map(cell => cell.textContent)")
    values = open_dataset(root=sample).columns["action"][:, 1].astype(np.float64)
    exact = [values.min(), *np.quantile(values, [0.01, 0.5, 0.99]), values.max(), values.mean(), values.std()]
    assert cells[0] == "v" and [float(text) for text in cells[2:9]] == pytest.approx(exact, rel=1e-4)
    counts = browser.run(f"[...{row}.querySelectorAll('rect title')].map(e => e.textContent.split(': ')[1])")
    assert sum(int(count) for count in counts) == len(values)


def test_what_the_check_found_and_the_filter(browser: Browser, sample: Path, tmp_path: Path):
    root = tmp_path / "broken"
    shutil.copytree(sample, root)
    tasks = next(root.glob("meta/tasks.parquet"))
    table = pq.read_table(tasks)
    texts = [HOSTILE if text == "lift" else text for text in table["task"].to_pylist()]
    pq.write_table(table.set_column(table.column_names.index("task"), "task", pa.array(texts)), tasks)
    spoil(root, "observation.state", row=2)
    opened(browser, root, tmp_path / "page.html")
    kinds = browser.run("[...document.querySelectorAll('.problem code')].map(e => e.textContent)")
    assert "not-finite" in kinds
    assert browser.run("document.querySelectorAll('#episode-0 .gap').length") == 3  # values of a state
    browser.run("document.querySelector('#only-problems').click()")
    hidden = browser.run("[...document.querySelectorAll('.episode')].map(e => e.hidden)")
    assert hidden[0] is False and any(hidden)
    browser.run("document.querySelector('#only-problems').click()")
    browser.run(
        "(e => { e.value = 'pull'; e.dispatchEvent(new Event('input')); })(document.querySelector('#search'))"
    )
    assert browser.run("document.querySelector('#count').textContent") == "1 episode"
    assert browser.run("window.hacked") is None and browser.errors == []


def spoil(root: Path, column: str, row: int) -> None:
    file = next((root / "data").rglob("*.parquet"))
    table = pq.read_table(file)
    values = table[column].to_pylist()
    values[row] = [float("nan")] * len(values[row])
    at = table.column_names.index(column)
    pq.write_table(
        table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type)), file
    )


@pytest.mark.parametrize(
    ("features", "lengths"),
    [
        ({"observation.state": vector(2)}, [5, 3]),  # no video
        ({"observation.state": vector(2), TOP: camera(32, 48)}, [1]),  # a single frame
        ({"action": vector(200), STILL: camera(32, 48, "image")}, [6]),  # images in the tables, many values
        ({TOP: camera(32, 300)} | {f"observation.images.{i}": camera(32, 32) for i in range(18)}, [3]),
        ({"<b>": vector(1), "observation.state": vector(2, ["</script>", "<i>"])}, [4]),
    ],
)
def test_unusual_datasets(browser: Browser, tmp_path: Path, features: dict, lengths: list[int]):
    opened(browser, written(tmp_path / "d", features, lengths, HOSTILE), tmp_path / "page.html")
    assert HOSTILE in browser.run("document.querySelector('.tasks').textContent")
    assert browser.run("window.hacked") is None and browser.errors == []


@pytest.mark.parametrize("name", ["video", "uint16", "float32"])
def test_depth_maps(browser: Browser, tmp_path: Path, name: str):
    opened(browser, Path(__file__).parents[2] / "golden/depth" / name, tmp_path / "page.html")
    text = browser.run("document.querySelector('#statistics .levels').textContent")
    assert text.startswith("depth: yellow is") and " mm" in text
    browser.wait("document.querySelector('.film img').complete")
    corner = """(([x, y]) => {
        const image = document.querySelector('.film img');
        const canvas = Object.assign(document.createElement('canvas'), {width: image.width, height: image.height});
        canvas.getContext('2d').drawImage(image, 0, 0);
        return [...canvas.getContext('2d').getImageData(x, y, 1, 1).data];
    })"""
    assert max(browser.run(f"{corner}([8, 8])")[:3]) < 40  # nothing measured
    assert browser.errors == []


def test_an_undecodable_episode_is_named(sample: Path, tmp_path: Path):
    root = tmp_path / "cut"
    shutil.copytree(sample, root)
    truncate(next((root / "videos" / TOP).rglob("*.mp4")), 0.7)
    result = show_dataset(root, tmp_path / "page.html", deep=True)
    assert result["errors"] > 0 and result["episodes_shown"] > 0
    assert "frames can't be decoded" in (tmp_path / "page.html").read_text()
    for video in (root / "videos").rglob("*.mp4"):
        video.write_bytes(b"nothing")
    with pytest.raises(DatasetError, match="can't be read"):
        show_dataset(root, tmp_path / "none.html")
    assert not (tmp_path / "none.html").exists()


def many_episodes(root: Path, count: int) -> Dataset:
    """A dataset of many episodes that share four videos."""
    axes = {"observation.state": vector(14), "action": vector(14), TOP: camera(48, 64)}
    rng = np.random.default_rng(0)
    with DatasetWriter(root, 10, axes, codec="h264", gop=1) as writer:
        for _ in range(4):
            for _ in range(6):
                noise = {TOP: rng.integers(0, 255, (48, 64, 3), dtype=np.uint8)}
                vectors = {
                    name: rng.normal(size=14).astype(np.float32) for name in ("observation.state", "action")
                }
                writer.add_frame(noise | vectors)
            writer.save_episode("push " + "x" * 1000)
    few, times = open_dataset(root=root), count // 4
    spread = Episodes(
        np.arange(count),
        np.tile(few.episodes.length, times),
        few.episodes.tasks * times,
        np.tile(few.episodes.first_frame, times),
    )
    return replace(
        few, episodes=spread, columns={n: np.concatenate([c] * times) for n, c in few.columns.items()}
    )


@pytest.mark.slow
def test_a_thousand_episodes_take_at_most_20_mb(browser: Browser, tmp_path: Path):
    """The images of a hundred, with what each has on a page of a thousand, then ten times the same."""
    dataset = many_episodes(tmp_path / "many", 100)
    limit = TEXT_BYTES + (PAGE_BYTES - TEXT_BYTES) // 10
    budgets = [page_budget([6] * 1000), page_budget(dataset.episodes.length.tolist(), limit)]
    assert budgets[0].image_bytes == budgets[1].image_bytes and len(budgets[0].episodes) == 1000
    calls: list[int] = []
    data = page_data(
        dataset, CheckReport(dataset.root, deep=False), limit, progress=lambda done, _: calls.append(done)
    )
    assert calls == list(range(1, 101))
    data["episodes"] = [
        episode | {"index": 100 * times + episode["index"]}
        for times in range(10)
        for episode in data["episodes"]
    ]
    file = tmp_path / "page.html"
    file.write_text(page("many", data=data, styles=STYLES, scripts=SCRIPTS))
    assert 2e6 < file.stat().st_size <= 20e6
    assert len(data["episodes"]) == 1000 and all(episode["image"] for episode in data["episodes"])
    assert (
        min(len(episode["frames"]) for episode in data["episodes"]) >= 2
    )  # noise is the hardest to compress
    browser.open(file)
    browser.run("document.querySelector('#episode-999').scrollIntoView()")
    browser.wait("document.querySelector('#episode-999 .film img')?.complete")
    assert browser.errors == []


def test_too_small_a_page_is_refused(sample: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="--max-mb"):
        show_dataset(sample, tmp_path / "page.html", limit=1000)


def test_the_command(sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "page.html"
    assert cli.main(["data", "show", str(sample), "--output", str(file), "--episodes", "0:2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["episodes_shown"] == 2 and result["bytes"] == file.stat().st_size
    assert cli.main(["data", "show", str(sample), "--output", str(file)]) == 0
    assert "4 episodes; the check found 0 errors" in capsys.readouterr().out
    file.write_text("mine")
    assert cli.main(["data", "show", str(sample), "--output", str(file)]) == 2
    assert cli.main(["data", "show", str(sample), "--output", str(file), "--terminal"]) == 2


@pytest.mark.parametrize("graphics", ["auto", "kitty", "sixel"])
def test_in_the_terminal(sample: Path, graphics: str, capsys: pytest.CaptureFixture[str]):
    assert (
        cli.main(["data", "show", str(sample), "--episode", "3", "--terminal", "--graphics", graphics]) == 0
    )
    out = capsys.readouterr().out
    assert out.startswith("episode 3: 10 frames, 1.0 s: lift") and TOP in out and "observation.state x" in out


FLAGS = "[...document.querySelectorAll('#episode-%d .film .flag')].map(e => Math.round(e.getBoundingClientRect().x))"


def test_marks_are_at_the_frames_where_the_check_found_something(browser: Browser, tmp_path: Path):
    """A glitch at frame 5 of episode 2, a camera that is off in episode 5; links and buttons lead to the frames."""
    root = write_arm(tmp_path / "arm", glitch(2, 5, 1), blank=[5], cameras=True)
    opened(browser, root, tmp_path / "page.html")
    links = "[...document.querySelectorAll('.problem a')]"
    texts = browser.run(f"{links}.map(e => e.textContent)")
    assert texts == ["2 (frame 5)", "5 (frame 0)"]
    assert browser.run("document.querySelectorAll('#episode-0 .mark').length") == 0
    browser.run(f"{links}[0].click()")
    label = "document.querySelector('#episode-2 .plots > .soft').textContent"
    assert browser.run(label).startswith("frame 5,")
    lines = (
        "[...document.querySelectorAll('#episode-2 .mark')].map(e => [e.getAttribute('x1'), e.textContent])"
    )
    ((at, text),) = browser.run(lines)
    assert float(at) == pytest.approx(600 * 5 / 14) and text.startswith(
        "values-out-of-range: observation.state[1]"
    )
    cursor = "document.querySelector('#episode-2 .cursor').getAttribute('x1')"
    assert browser.run(cursor) == at
    browser.run("document.querySelector('#episode-2 .marks button').click()")
    assert browser.run(label).startswith("frame 5,")
    browser.run(f"{links}[1].click()")
    assert len(browser.run(FLAGS % 5)) == 1 and browser.run(FLAGS % 2) == []
    assert (
        browser.run("document.querySelectorAll('#episode-5 .mark').length") == 0
    )  # a camera's is on its images
    assert browser.errors == []


def test_marked_frames_are_on_the_strip():
    assert with_marked([0, 10, 20, 30], [12]) == [0, 12, 20, 30]
    assert with_marked([0, 10, 20, 30], [20]) == [0, 10, 20, 30]
    assert with_marked([0, 10], [3, 4, 5]) == [3, 4]
    report = CheckReport(Path(), deep=True)
    report.warning("clock-drift", "late", "none", episode=1, frame=7, feature="timestamp")
    report.warning("totals", "wrong", "none")
    marks = frame_marks(report, [0, 1])
    assert marks[0] == [] and [(m["frame"], m["kind"], m["text"]) for m in marks[1]] == [
        (7, "clock-drift", "late")
    ]
