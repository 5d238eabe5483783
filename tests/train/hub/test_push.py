"""Runs that are pushed while they train, and resumed from the Hub; with a Hub that fails, and one that is not there."""

import copy
import hashlib
import json
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load

from flexor.cli.main import main
from flexor.core import hub_errors
from flexor.core.errors import CheckpointError, ConfigError, FlexorError
from flexor.core.hub import HubRepository
from flexor.policies.pretrained import find_folder, load_pretrained
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.hub import background
from flexor.train.hub.download import fetch_run
from support import runs
from support.hub_server import QUOTA, TOKEN, Blob, HubServer, Repo, everything_written, hub
from support.limits import wait_for
from support.small_policies import small_flags

REPO = "--policy.repo_id=ann/run"
EVERY = ("--save_checkpoint_to_hub=true", "--save_freq=2")
PRETRAINED_ON_HUB = "checkpoints/000001/pretrained_model/"
POLICY = {"config.json", "model.safetensors", "train_config.json", "policy_preprocessor.json"}


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub_errors, "FIRST_WAIT", 0.01)
    with hub(monkeypatch, tmp_path / "downloads") as server:
        yield server


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(hub_errors, "PATIENCE", 0.3)
    monkeypatch.setattr(background, "PATIENCE", 0.3)


@pytest.fixture(scope="module")
def first(lowdim, tiny_act, tmp_path_factory):
    """A run of 4 steps that has pushed two checkpoints, and what the Hub has of it then."""
    folder = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as monkeypatch, hub(monkeypatch, folder / "downloads") as server:
        flags = (REPO, *EVERY, "--steps=4", "--log_freq=2")
        run = runs.train(lowdim, folder / "run", tiny_act, *flags)
        assert main(["push", str(run), "--checkpoints"]) == 0  # one that was skipped, if any
        return run, server.model("ann/run"), server.large


@pytest.fixture
def pushed(first, server):
    """The Hub has that run."""
    run, repo, large = first
    copied = copy.deepcopy(repo)
    copied.url = f"{server.address}/ann/run"
    server.repos["models", "ann/run"], server.large = copied, dict(large)
    return run


@pytest.fixture
def train(lowdim, tiny_act, tmp_path):
    def start(*more: str, name: str = "run", steps: int = 4) -> Path:
        return runs.train(lowdim, tmp_path / name, tiny_act, f"--steps={steps}", "--log_freq=2", *more)

    return start


def files(server: HubServer) -> dict[str, bytes]:
    return {name: blob.data for name, blob in server.model("ann/run").files.items()}


def folder_files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def as_pushed(folder: Path) -> dict[str, bytes]:
    """The files of a folder that are pushed as they are: those with paths of this machine are not."""
    changed = ("train_config.json", "flexor.json", "manifest.json")
    return {name: data for name, data in folder_files(folder).items() if not name.endswith(changed)}


def test_a_policy_that_acts_in_bfloat16_is_pushed_in_it(server, dataset, tmp_path, capsys):
    """The checkpoint beside it keeps what resuming needs."""
    tiny = [*small_flags("smolvla", tmp_path / "files"), "--policy.device=cpu"]
    run = runs.train(dataset, tmp_path / "run", tiny, "--steps=1", REPO, "--save_checkpoint_to_hub=true")
    pushed = files(server)
    policy, resumable = (pushed[f"{folder}model.safetensors"] for folder in ("", PRETRAINED_ON_HUB))
    assert resumable == (find_folder(str(run)) / "model.safetensors").read_bytes()
    assert {weight.dtype for weight in load(resumable).values()} == {torch.float32}
    assert load(policy).keys() == load(resumable).keys()
    expert = "model.vlm_with_expert.lm_expert.norm.weight"
    assert load(policy)[expert].dtype == torch.bfloat16
    assert main(["push", str(run), "--checkpoints"]) == 0
    assert files(server)["model.safetensors"] == policy


def test_the_policy_at_the_end(server, train, capsys, tmp_path):
    """As in LeRobot, naming a repository is enough. The policy is at its root, for both programs."""
    run = train(REPO, "--policy.private=true", "--policy.tags=[kitchen]", "--policy.license=mit", "--json")
    report = json.loads(capsys.readouterr().out)["hub"]
    assert report["pushed"] and report["checkpoint"] == "000004" and report["error"] is None
    assert report["url"] == f"{server.address}/ann/run"
    repo, remote = server.model("ann/run"), files(server)
    assert repo.private and repo.refs["main"] == report["commit"] and not repo.tags
    last = as_pushed(run / "checkpoints/last/pretrained_model")
    assert {name: remote[name] for name in last} == last and remote.keys() >= POLICY
    assert not [name for name in remote if name.startswith("checkpoints/")]
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["dataset"]["root"] = "lowdim"
    assert yaml.safe_load(remote["config.yaml"]) == settings
    assert not (run / ".hub").exists()
    loaded = load_pretrained("ann/run")
    assert loaded.policy.config.type == "act" and loaded.policy.config.repo_id is None


def test_the_card_says_what_was_trained_on_what(server, train):
    run = train(REPO, "--policy.tags=[kitchen]", "--policy.license=mit")
    card = files(server)["README.md"].decode()
    _, front, text = card.split("---\n", 2)
    about = yaml.safe_load(front)
    assert about["license"] == "mit" and about["library_name"] == "lerobot"
    assert about["tags"] == ["robotics", "lerobot", "flexor", "act", "kitchen"]
    assert "datasets" not in about  # it is not on the Hub
    loss = runs.figures(run)[-1]["loss"]
    for part in (
        "step 4 of 4",
        'load_pretrained("ann/run"',
        'get_policy_class("act").from_pretrained("ann/run")',
        f"| loss | {loss:.5g} (step 4) |",
        "| episodes | 4 |",
        "| learning rate | 0.001 |",
        "| versions | flexor ",
    ):
        assert part in text, part
    assert "flexor resume hub:" not in text and "Plan and reality" not in text


def test_plan_and_reality_are_on_the_card(server, train):
    from flexor.train.checkpoint.run_record import note

    run = train()
    note(run, plan={"planned_allocated_bytes": 2e9, "planned_step_s": 0.01})  # while it trains
    assert main(["push", str(run), "--repo_id=ann/run"]) == 0
    assert "Plan and reality" not in files(server)["README.md"].decode()
    note(
        run,
        plan={
            "planned_allocated_bytes": 2e9,
            "allocated_bytes": 2.1e9,
            "planned_step_s": 0.01,
            "step_s": 0.012,
        },
    )
    assert main(["push", str(run), "--repo_id=ann/run"]) == 0
    card = files(server)["README.md"].decode()
    assert "| time per step | 10 ms planned, 12 ms measured |" in card
    assert "| peak memory per GPU | " in card


def test_nothing_is_pushed_unless_asked_for(server, train):
    train()
    train(REPO, "--policy.push_to_hub=false", name="other")
    assert not server.request_lines


def test_every_checkpoint_and_resume_from_the_hub_exactly(
    server, train, tmp_path, lowdim, tiny_act, log_lines, capsys
):
    """A run of 4 steps is pushed; another machine downloads it and goes on to 6, bitwise as if nothing had happened."""
    run = train(REPO, *EVERY)
    repo, remote = server.model("ann/run"), files(server)
    assert repo.tags.keys() == {"000002", "000004"}
    for name in ("000002", "000004"):
        local = as_pushed(run / "checkpoints" / name)
        assert {n: remote[f"checkpoints/{name}/{n}"] for n in local} == local
        at_tag = repo.commits[repo.tags[name]]
        assert at_tag["model.safetensors"].data == local["pretrained_model/model.safetensors"]
    assert "flexor resume hub:ann/run" in remote["README.md"].decode()
    shutil.rmtree(run)
    assert main(["resume", "hub:ann/run", "--steps=6"]) == 2
    assert "trained on the folder 'lowdim'" in capsys.readouterr().err
    assert main(["resume", "hub:ann/run", "--steps=6", f"--dataset.root={lowdim}"]) == 0
    resumed = tmp_path / "runs/run"
    assert [p.name for p in checkpoint.complete(resumed / "checkpoints").values()] == ["000004", "000006"]
    assert repo.tags.keys() == {"000002", "000004", "000006"}  # and it is pushed on
    uninterrupted = runs.train(lowdim, tmp_path / "whole", tiny_act, "--steps=6", "--log_freq=2")
    assert runs.figures(resumed) == runs.figures(uninterrupted)
    assert main(["resume", "hub:ann/run", "--steps=6"]) == 0  # nothing to download
    assert any("already has checkpoint 000006" in line for line in log_lines)


def test_resume_at_a_step(pushed, tmp_path):
    run = fetch_run("hub:ann/run@000002", tmp_path / "two")
    assert [*checkpoint.complete(run / "checkpoints")] == [2] and (run / "checkpoints/last").is_symlink()
    fetch_run("hub:ann/run", tmp_path / "two")  # the newest
    with pytest.raises(
        ConfigError, match="already has checkpoint 000004 of this run, which is newer than 000002"
    ):
        fetch_run("hub:ann/run@000002", tmp_path / "two")


@pytest.mark.parametrize("damage", ["manifest", "weights", "changed", "same size"])
def test_a_checkpoint_that_is_not_complete_is_not_resumed(server, pushed, tmp_path, damage, log_lines):
    remote = server.model("ann/run").files
    base = "checkpoints/000004"
    weights = f"{base}/training_state/optimizer_state.safetensors"
    if damage == "manifest":
        del remote[f"{base}/training_state/manifest.json"]
    elif damage == "weights":
        del remote[weights]
    elif damage == "changed":
        remote[weights] = Blob(b"something else", True)
    else:  # small files have no hash in the list: it is found after the download
        name = f"{base}/training_state/flexor.json"
        remote[name] = Blob(remote[name].data[:-1] + b" ", False)
    if damage == "same size":
        with pytest.raises(
            CheckpointError, match=r"000004 of .* arrived damaged and was removed: .*flexor.json"
        ):
            fetch_run("hub:ann/run", tmp_path / "here")
        assert not checkpoint.complete(tmp_path / "here/checkpoints")
        return
    run = fetch_run("hub:ann/run", tmp_path / "here")
    assert [*checkpoint.complete(run / "checkpoints")] == [2]
    assert any("checkpoint 000004 of" in line and "is not complete" in line for line in log_lines)


@pytest.mark.parametrize("name", ["\u00b2", "9" * 200])
def test_a_folder_that_is_no_step_is_no_checkpoint(server, pushed, tmp_path, name):
    server.model("ann/run").files[f"checkpoints/{name}/x"] = Blob(b"x", False)
    assert [*checkpoint.complete(fetch_run("hub:ann/run", tmp_path / "here") / "checkpoints")] == [4]


def test_an_upload_that_breaks_off_leaves_the_checkpoint_before(server, impatient, train, tmp_path):
    """Half of a checkpoint's files are uploaded when the network goes: they are not a checkpoint."""
    train(REPO, *EVERY, steps=2)
    server.troubles.extend([("PUT /upload", "drop")] * 1000)
    server.troubles.append(("/commit/", (500, {})))
    main(["resume", "run", "--steps=4"])
    assert server.model("ann/run").tags.keys() == {"000002"}
    run = fetch_run("hub:ann/run", tmp_path / "here")
    assert [*checkpoint.complete(run / "checkpoints")] == [2]


def test_a_broken_download_goes_on(server, pushed, tmp_path):
    server.troubles.extend(
        [("GET .*optimizer_state", "drop"), ("/tree/", (503, {})), ("GET .*manifest", (500, {}))]
    )
    run = fetch_run("hub:ann/run", tmp_path / "here")
    checkpoint.verify(checkpoint.newest(run / "checkpoints"))
    assert [p.name for p in (run / "checkpoints").iterdir() if p.name.startswith(".")] == []


def test_a_download_does_not_write_through_a_link(server, pushed, tmp_path):
    run = fetch_run("hub:ann/run@000002", tmp_path / "here")
    (tmp_path / "precious").write_text("mine")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(tmp_path / "precious")
    with pytest.raises(FlexorError, match="leads out of the folder"):
        fetch_run("hub:ann/run", run)
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_folder_that_is_taken(pushed, train):
    train(name="runs/run", steps=2)
    with pytest.raises(ConfigError, match=r"runs/run exists and is not the run in .*ann/run. .*--output_dir"):
        fetch_run("hub:ann/run")


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("hub:run", "give hub:USER/NAME"),
        ("hub:ann/none", "ann/none does not exist"),
        ("hub:ann/model", "no complete"),
    ],
)
def test_what_is_not_a_run(server, pushed, address, error):
    remote = server.model("ann/run").files
    policy = {name: blob for name, blob in remote.items() if not name.startswith("checkpoints/")}
    server.repos["models", "ann/model"] = Repo(f"{server.address}/ann/model")
    server.model("ann/model").commit(policy, "only the policy")
    assert main(["resume", address]) in (1, 2)
    with pytest.raises(Exception, match=error):
        fetch_run(address)


# A Hub that fails


def test_training_goes_on_without_the_network(server, impatient, train, log_lines, capsys, monkeypatch):
    """From the first step to the last: it ends well, says what is missing, and the rest is pushed by hand later."""
    server.unplugged = True
    run = train(REPO, *EVERY, "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["step"] == 4 and not report["hub"]["pushed"] and "Can't reach" in report["hub"]["error"]
    assert any("The run is not pushed yet: Can't reach" in line for line in log_lines)
    assert any(f"flexor push {run} --checkpoints" in line for line in log_lines)
    assert not (run / ".hub").exists()
    server.unplugged = False
    assert main(["push", str(run), "--checkpoints", "--json"]) == 0
    pushed = json.loads(capsys.readouterr().out)
    assert pushed["checkpoint"] == "000004" and pushed["checkpoints"] == ["000002", "000004"]
    assert server.model("ann/run").tags.keys() == {"000002", "000004"}
    fetched = fetch_run("hub:ann/run", run.parent / "here")
    assert as_pushed(fetched / "checkpoints/000004") == as_pushed(run / "checkpoints/000004")


def test_a_network_that_comes_back_in_time(server, train, log_lines):
    server.troubles.extend(
        [("/tree/", "drop"), ("/commit/", (500, {})), ("/commit/", (429, {"Retry-After": "0"}))]
    )
    server.troubles.extend([("PUT /upload", "drop")] * 3)
    train(REPO, *EVERY)
    assert {"000004"} <= server.model("ann/run").tags.keys() and not server.troubles
    assert any("pushed to" in line for line in log_lines)


def test_offline_mode_is_only_a_warning(server, train, log_lines, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    run = train(REPO)
    assert any(f"Push it later with: flexor push {run}" in line for line in log_lines)


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        ((401, {}), "does not accept your token"),
        ((403, {}), "no permission to write"),
        (QUOTA, "storage of ann on the Hub is full"),
    ],
)
def test_a_wrong_token_is_found_before_training(server, lowdim, tiny_act, tmp_path, capsys, trouble, error):
    """And nothing is left behind, so that the same command works as soon as the token does."""
    server.troubles.append(("repos/create", trouble))
    flags = runs.flags(lowdim, tmp_path / "run", tiny_act, REPO, "--steps=1")
    assert main(["train", *flags]) == 1
    assert error in capsys.readouterr().err and not (tmp_path / "run").exists()
    assert main(["train", *flags]) == 0


@pytest.mark.parametrize("trouble", [(401, {}), (403, {}), QUOTA])
def test_a_rejection_during_training_does_not_stop_it(server, train, trouble, log_lines):
    server.troubles.append(("/preupload/", trouble))
    run = train(REPO, *EVERY)
    assert any("checkpoint 000002 was not pushed" in line for line in log_lines)
    assert checkpoint.newest(run / "checkpoints").name == "000004"
    assert "000004" in server.model("ann/run").tags  # tried again with the next one


def test_training_does_not_wait_for_a_slow_upload(server, train, log_lines, monkeypatch):
    """The Hub takes no commit until the last step is saved. The checkpoint that waited is skipped, the last pushed."""
    finished, finish = threading.Event(), background.Pusher.finish

    def last(self: background.Pusher, complete: bool) -> None:
        finished.set()  # training is over
        finish(self, complete)

    saved = background.Pusher.saved

    def begin(self: background.Pusher, folder: Path) -> None:
        saved(self, folder)
        if folder.name == "000001":
            wait_for(lambda: self.waiting is None)  # it is being uploaded

    monkeypatch.setattr(background.Pusher, "finish", last)
    monkeypatch.setattr(background.Pusher, "saved", begin)
    server.before_commit = lambda: wait_for(finished.is_set)
    train(REPO, "--save_checkpoint_to_hub=true", "--save_freq=1", "--checkpoint.keep_last=1")
    tags = server.model("ann/run").tags.keys()
    assert "000004" in tags and "000001" in tags  # which keep_last had removed during its upload
    assert any("is not pushed: 00000" in line and "is newer" in line for line in log_lines)


def test_a_signal_ends_the_waiting_for_the_last_push(server, train, log_lines, capsys, monkeypatch):
    """The run is done and saved: it ends well, and says how to push it later."""
    done, finish = threading.Event(), background.Pusher.finish

    def told(self: background.Pusher, complete: bool) -> None:
        server.before_commit = lambda: wait_for(done.is_set)
        threading.Timer(0.2, setattr, (self.stop_signal, "signal", signal.SIGTERM)).start()
        finish(self, complete)

    monkeypatch.setattr(background.Pusher, "finish", told)
    try:
        run = train(REPO, "--json")
    finally:
        done.set()
    report = json.loads(capsys.readouterr().out)["hub"]
    assert not report["pushed"] and "interrupted" in report["error"]  # while it waits, or between two files
    assert any(f"Push it later with: flexor push {run}" in line for line in log_lines)


def test_another_runs_checkpoints_are_not_mixed_with_ours(pushed, lowdim, tiny_act, tmp_path, capsys):
    flags = runs.flags(lowdim, tmp_path / "other", tiny_act, REPO, "--steps=2")
    assert main(["train", *flags]) == 1
    assert "already holds the checkpoints of another run" in capsys.readouterr().err
    shutil.copytree(pushed, "run", symlinks=True)
    assert main(["resume", "run", "--steps=5"]) == 0  # the same run may


def test_a_policy_replaces_the_one_before(server, train):
    """Also files that the new one does not have; a card that somebody has written stays."""
    train(REPO)
    remote = server.model("ann/run").files
    remote["policy_preprocessor_step_9_old.safetensors"] = Blob(b"old", True)
    remote["photo.jpg"] = Blob(b"mine", False)
    remote["README.md"] = Blob(b"---\nlicense: mit\n---\nMy own words.", False)
    run = train(REPO, name="second", steps=2)
    now = files(server)
    assert "policy_preprocessor_step_9_old.safetensors" not in now and now["photo.jpg"] == b"mine"
    assert now["README.md"].endswith(b"My own words.")
    assert (
        now["model.safetensors"] == (run / "checkpoints/last/pretrained_model/model.safetensors").read_bytes()
    )


def test_the_token_is_nowhere(server, train, tmp_path, log_lines, capfd):
    server.troubles.extend([("/commit/", (400, {"X-Error-Message": f"{TOKEN}?"})), ("PUT /upload", "drop")])
    train(REPO, *EVERY)
    main(["push", "run", "--checkpoints", "--json"])  # whichever checkpoint the trouble was with
    fetch_run("hub:ann/run", tmp_path / "here")
    main(["push", "nowhere"])
    output = capfd.readouterr()
    assert TOKEN not in output.out + output.err + "\n".join(log_lines)
    assert [path for path, data in everything_written(tmp_path) if TOKEN.encode() in data] == []
    assert not any(TOKEN.encode() in blob.data for blob in server.model("ann/run").files.values())


def test_what_the_hub_does_not_have_is_not_called_pushed(server, impatient, train, monkeypatch, capsys):
    run = train()
    commit = HubRepository.commit

    def lose(self, files, *rest):
        return commit(
            self, {n: f for n, f in files.items() if not n.endswith("rng_state.safetensors")}, *rest
        )

    monkeypatch.setattr(HubRepository, "commit", lose)
    assert main(["push", str(run), "--repo_id=ann/run", "--checkpoints"]) == 1
    error = capsys.readouterr().err
    assert "does not have checkpoints/000004/training_state/rng_state.safetensors as it was saved" in error
    assert not server.model("ann/run").tags


def test_a_policy_alone_is_compared_with_its_manifest_too(server, impatient, train, monkeypatch, capsys):
    run = train()
    commit = HubRepository.commit
    processing = run / "checkpoints/000004/pretrained_model/policy_preprocessor.json"

    def damage(self, files, *rest):  # such as a disk that returns something else
        changed = processing.read_text()
        processing.write_text(changed.replace("1", "2"))
        return commit(self, files, *rest)

    monkeypatch.setattr(HubRepository, "commit", damage)
    assert main(["push", str(run), "--repo_id=ann/run"]) == 1
    assert "does not have policy_preprocessor.json as it was saved here" in capsys.readouterr().err


def test_no_damaged_checkpoint_is_pushed(server, train, capsys):
    run = train("--save_freq=2")
    (run / "checkpoints/000002/training_state/scheduler_state.json").write_text("{}")
    assert main(["push", str(run), "--repo_id=ann/run", "--checkpoints"]) == 1
    assert "000002 is damaged: training_state/scheduler_state.json" in capsys.readouterr().err


def test_hidden_files_of_a_checkpoint_are_pushed_too(server, train):
    """Such as the index of the shards of earlier runs."""
    run = train()
    saved = run / "checkpoints/000004"
    (saved / "training_state/.metadata").write_bytes(b"index")
    manifest = saved / "training_state/manifest.json"
    listed = json.loads(manifest.read_text())
    listed["files"]["training_state/.metadata"] = {"size": 5, "sha256": hashlib.sha256(b"index").hexdigest()}
    manifest.write_text(json.dumps(listed))
    assert main(["push", str(run), "--repo_id=ann/run", "--checkpoints"]) == 0
    assert files(server)["checkpoints/000004/training_state/.metadata"] == b"index"


# flexor push


def test_push_shows_what_it_would_do(server, train, capsys):
    run = train("--json")
    capsys.readouterr()
    assert (
        main(["push", str(run), "--repo_id=ann/run", "--license=mit", "--tags=a,b", "--dry-run", "--json"])
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert report["dry_run"] and "model.safetensors" in report["files"] and "license: mit" in report["card"]
    assert not server.request_lines


def test_push_of_one_checkpoint(server, train, capsys):
    run = train("--save_freq=2")
    assert main(["push", str(run / "checkpoints/000002"), "--repo_id=ann/run", "--private"]) == 0
    assert f"pushed checkpoint 000002 of {run} to {server.address}/ann/run" in capsys.readouterr().out
    weights = (run / "checkpoints/000002/pretrained_model/model.safetensors").read_bytes()
    assert files(server)["model.safetensors"] == weights and server.model("ann/run").private


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["push", "run"], "run was trained without a repository: name it with --repo_id=USER/NAME"),
        (
            ["push", "none", "--repo_id=ann/run"],
            "none is neither a run folder with checkpoints nor a checkpoint",
        ),
    ],
)
def test_push_of_what_can_not_be_pushed(server, train, capsys, arguments, error):
    train(steps=1)
    assert main(arguments) == 1
    assert error in capsys.readouterr().err
