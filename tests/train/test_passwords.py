"""A password in a dataset's URL is used, and written nowhere; how such a run resumes; what others see of it."""

import json
from base64 import b64encode
from pathlib import Path

import fsspec
import pytest
import yaml
from fsspec.config import set_conf_env

from flexor.cli.main import main
from flexor.core import hub_errors
from flexor.core.typed import with_settings
from flexor.monitor.trackers import settings_of
from flexor.train.checkpoint.resume import resumed_config
from support import runs
from support.file_server import FileServer
from support.hub_server import HubServer, everything_written, hub
from support.own_policy import own_policy

LOGIN = "ann:pens-and-cups"
PASSWORD = "pens-and-cups"


@pytest.fixture
def data(lowdim, monkeypatch, tmp_path):
    """A server with the dataset, which wants a password."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLEXOR_CACHE", str(tmp_path / "cache"))
    with FileServer(lowdim.parent) as server:
        server.login = LOGIN
        yield server


@pytest.fixture
def root(data, lowdim) -> str:
    return f"http://{LOGIN}@{data.address.removeprefix('http://')}/{lowdim.name}"


@pytest.fixture
def run(root, tiny_act, tmp_path) -> Path:
    return runs.train(root, tmp_path / "run", tiny_act, "--steps=2", "--log_freq=1")  # type: ignore[arg-type]


def test_it_is_written_nowhere(run, root, tiny_act, tmp_path, capfd, log_lines):
    assert main(["report", str(run)]) == 0
    assert main(["data", "info", root, "--json"]) == 0
    assert main(["data", "info", f"{root}-missing"]) == 1
    output = capfd.readouterr()
    assert PASSWORD not in output.out + output.err and "***@" in output.err
    assert [path for path, content in everything_written(tmp_path) if PASSWORD.encode() in content] == []
    saved = yaml.safe_load((run / "config.yaml").read_text())["dataset"]["root"]
    assert saved == root.replace(LOGIN, "***")


def test_trackers_do_not_get_it(run, root, tiny_act, tmp_path):
    config = resumed_config(run, {"dataset.root": root})
    config = with_settings(config, {"sample_weighting.progress_path": f"{root}/progress.parquet"})
    for name in ("wandb", "trackio"):
        assert PASSWORD not in json.dumps(settings_of(name, config, "id"))


def test_resume_asks_for_it_again(run, root, capsys, tmp_path, lowdim, tiny_act):
    assert main(["resume", str(run), "--steps=3"]) == 2
    error = capsys.readouterr().err
    assert "Passwords are not stored with a run: give the address again with --dataset.root=..." in error
    assert main(["resume", str(run), "--steps=3", f"--dataset.root={root}"]) == 0
    flags = runs.flags(root, run, tiny_act, "--steps=4", "--log_freq=1", "--resume=auto")  # type: ignore[arg-type]
    assert main(["train", *flags]) == 0  # the same command again
    assert PASSWORD not in (run / "config.yaml").read_text()


def test_or_it_comes_from_the_settings_of_fsspec(run, data, lowdim, monkeypatch):
    """As docs/data.md describes. Then it is in no address, and the run resumes. It is the same dataset."""
    header = {"Authorization": f"Basic {b64encode(LOGIN.encode()).decode()}"}
    settings: dict[str, dict[str, object]] = {}
    set_conf_env(
        settings, {"FSSPEC_HTTP": json.dumps({"headers": header})}
    )  # fsspec reads it once, at its import
    monkeypatch.setitem(fsspec.config.conf, "http", settings["http"])
    address = f"{data.address}/{lowdim.name}"
    assert main(["resume", str(run), "--steps=3", f"--dataset.root={address}"]) == 0
    assert main(["resume", str(run), "--steps=4"]) == 0


def _pushed(server: HubServer) -> dict[str, bytes]:
    repository = server.repos.get(("models", "ann/run"))
    return {name: blob.data for name, blob in repository.files.items()} if repository else {}


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub_errors, "FIRST_WAIT", 0.01)
    with hub(monkeypatch, tmp_path / "downloads") as server:
        yield server


def test_a_pushed_run_names_no_path_of_this_machine(server, lowdim, tiny_act, tmp_path):
    base = runs.train(lowdim, tmp_path / "base", tiny_act, "--steps=1")
    more = ("--steps=2", "--policy.repo_id=ann/run", "--save_checkpoint_to_hub=true", "--wandb.notes=mine")
    run = runs.train(lowdim, tmp_path / "run", [], f"--policy.path={base}", *more)
    pushed = _pushed(server)
    assert "checkpoints/000002/training_state/flexor.json" in pushed and "config.yaml" in pushed
    for place in (tmp_path, lowdim, Path.home(), Path.cwd()):
        assert [name for name, data in pushed.items() if str(place).encode() in data] == []
    assert yaml.safe_load(pushed["config.yaml"])["policy_path"] == "base"
    assert str(lowdim) in (run / "config.yaml").read_text()  # on this machine it stays


def test_old_runs_with_a_password_are_pushed_without_it(server, lowdim, tiny_act, tmp_path):
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=1")
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["dataset"]["root"] = f"https://{LOGIN}@example.com/pens"
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    assert main(["push", str(run), "--repo_id=ann/run"]) == 0
    assert not any(PASSWORD.encode() in data for data in _pushed(server).values())
    assert yaml.safe_load(_pushed(server)["config.yaml"])["dataset"]["root"] == "https://***@example.com/pens"


@pytest.mark.parametrize(
    "where", ["pretrained_model/notes.json", "training_state/more", "training_state/.env"]
)
def test_links_are_not_pushed(server, lowdim, tiny_act, tmp_path, capsys, where):
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=1")
    secret = tmp_path / "elsewhere" / "id_rsa"
    secret.parent.mkdir()
    secret.write_text("mine alone")
    link = run / "checkpoints/000001" / where
    link.symlink_to(secret.parent if where.endswith("more") else secret)
    code = main(["push", str(run), "--repo_id=ann/run", "--checkpoints"])
    assert not any(b"mine alone" in data for data in _pushed(server).values())
    if ".env" not in where:
        assert code == 1 and "is a symbolic link to" in capsys.readouterr().err


def test_a_link_is_not_pushed_by_a_run_that_trains(
    server, lowdim, tiny_act, tmp_path, monkeypatch, log_lines
):
    from flexor.train.hub import background

    secret = tmp_path / "id_rsa"
    secret.write_text("mine alone")
    saved = background.Pusher.saved

    def with_link(self: background.Pusher, folder: Path) -> None:
        (folder / "training_state" / "notes").symlink_to(secret)
        saved(self, folder)

    monkeypatch.setattr(background.Pusher, "saved", with_link)
    more = ("--steps=1", "--policy.repo_id=ann/run", "--save_checkpoint_to_hub=true")
    runs.train(lowdim, tmp_path / "run", tiny_act, *more)
    assert not any(b"mine alone" in data for data in _pushed(server).values())
    assert any("was not pushed" in line and "symbolic link" in line for line in log_lines)


def test_a_run_on_several_datasets_asks_for_their_folders(server, lowdim, tiny_act, tmp_path, capsys):
    mix = f"[{{root: {lowdim}, weight: 1}}, {{root: {lowdim}, weight: 2, episodes: '0:2'}}]"
    more = ("--steps=1", "--policy.repo_id=ann/run", "--save_checkpoint_to_hub=true")
    flags = [
        flag for flag in runs.flags(lowdim, tmp_path / "run", tiny_act, *more) if "dataset.root" not in flag
    ]
    assert main(["train", *flags, f"--dataset.mix={mix}"]) == 0
    assert main(["resume", "hub:ann/run", "--steps=2", "--output_dir=again"]) == 2
    assert "with --dataset.mix=[...], with the root of each dataset" in capsys.readouterr().err
    assert main(["resume", "again", "--steps=2", f"--dataset.mix={mix}"]) == 0


def test_a_policy_of_the_users_own_from_the_hub(server, lowdim, tmp_path):
    """Its file is named again, where it is on this machine; another one is refused."""
    for name in ("own.py", "moved/own.py", "moved/other.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(own_policy(BODY))
    more = ("--steps=1", "--policy.repo_id=ann/run", "--save_checkpoint_to_hub=true", "--policy.device=cpu")
    runs.train(lowdim, tmp_path / "run", ["--policy.type=own.py:Own"], *more)
    assert yaml.safe_load(_pushed(server)["config.yaml"])["policy"]["type"] == "own.py:Own"
    resume = ["resume", "hub:ann/run", "--steps=2", "--output_dir=again", f"--dataset.root={lowdim}"]
    assert main([*resume, "--policy.type=moved/other.py:Own"]) == 2
    assert main([*resume, f"--policy.type={tmp_path}/moved/own.py:Own"]) == 0


BODY = """        self.scale = torch.nn.Parameter(torch.ones(1))
    def loss(self, batch, noise):
        return Loss((batch["action"][:, 0] * self.scale).square().mean(1), {})
    def predict(self, batch, noise):
        return torch.zeros(len(batch["observation.state"]), 1, 2)
"""


def test_an_export_copies_no_link(lowdim, tiny_act, tmp_path, capsys):
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=1")
    secret = tmp_path / "id_rsa"
    secret.write_text("mine alone")
    (run / "checkpoints/000001/pretrained_model/notes").symlink_to(secret)
    assert main(["export", str(run), f"--output={tmp_path / 'out'}"]) == 1
    assert "is a symbolic link" in capsys.readouterr().err and not (tmp_path / "out").exists()
