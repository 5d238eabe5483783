"""Names of the files and folders of a run, and where its newest checkpoint is."""

from pathlib import Path

RUN_CONFIG = "config.yaml"  # all settings of the run
METRICS = "metrics.jsonl"
SYSTEM = "system.jsonl"  # samples of the GPUs and of rank 0's host; system-8.jsonl: of the host of rank 8
PROFILE = "profile"  # traces of --profile
TENSORBOARD = "tensorboard"
RUN_RECORD = "run.json"  # what was trained where, and how it compares with the plan
DATA_FILES = "data_files.json"  # hashes of the metadata, tables and videos that the run is trained on
LOG = "train.log"  # what the run logged, of all its starts
NOTES = "notes.md"  # what a person wrote about the run
LOCK = ".lock"
LAUNCH = ".launch"  # which launch started the run
CHECKPOINTS = "checkpoints"  # 000100, 000200, ..., last
LAST = "last"  # a link to the newest checkpoint, where the file system has links
VIDEOS = "videos"
PRETRAINED = "pretrained_model"  # of a checkpoint: the policy in LeRobot's format
POLICY_CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TRAINING_DATA = (
    "training_data.json"  # beside a policy: a short description of the data that it was trained on
)
SPLIT_WEIGHTS = "model.safetensors.index.json"  # of other programs: which file has which weight
TORCH_SHARDS = "pytorch_model_fsdp_0"  # LeRobot's weights in torch's distributed checkpoint
TRAINING_STATE = "training_state"  # of a checkpoint: what resuming needs besides the policy
SHARDS = "sharded"  # of the training state: each rank's part of the tensors
MANIFEST = f"{TRAINING_STATE}/manifest.json"  # of a checkpoint: written last, so a folder with it is complete


def sent_file(folder: Path, tracker: str) -> Path:
    """How many lines of the metrics a tracker has got."""
    return folder / f".sent-{tracker}.json"


def numbered_checkpoints(checkpoints: Path) -> dict[int, Path]:
    """step -> folder, oldest first; also of checkpoints that are not complete."""
    folders = checkpoints.iterdir() if checkpoints.is_dir() else ()
    steps = {int(path.name): path for path in folders if path.name.isascii() and path.name.isdigit()}
    return dict(sorted(steps.items()))


def newest_checkpoints(checkpoints: Path) -> list[Path]:
    """The folders of a run's checkpoints, the newest complete one first.

    A copy of a run may have followed the link `last`, or lost it: where there is a manifest, the number counts. In
    LeRobot's runs there is none, and `last` says which one is complete.
    """
    folders = list(reversed(numbered_checkpoints(checkpoints).values()))
    complete = [folder for folder in folders if (folder / MANIFEST).is_file()]
    return [*complete, *([checkpoints / LAST] if (checkpoints / LAST).is_dir() else []), *folders]


def find_last(path: Path) -> Path:
    """The path; if it is in RUN/checkpoints/last and that is missing, as without links, in the newest checkpoint."""
    for folder in (path, *path.parents):
        if folder.name == LAST and folder.parent.name == CHECKPOINTS and not folder.exists():
            return next((new / path.relative_to(folder) for new in newest_checkpoints(folder.parent)), path)
    return path
