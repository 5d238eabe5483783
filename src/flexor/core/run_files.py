"""Names of the files and folders of a run."""

from pathlib import Path

RUN_CONFIG = "config.yaml"  # all settings of the run
METRICS = "metrics.jsonl"
SYSTEM = "system.jsonl"  # samples of the GPUs and of rank 0's host; system-8.jsonl: of the host of rank 8
PROFILE = "profile"  # traces of --profile
TENSORBOARD = "tensorboard"
RUN_RECORD = "run.json"  # what was trained where, and how it compares with the plan
DATA_FILES = "data_files.json"  # hashes of the metadata, tables and videos that the run is trained on
LOG = "train.log"  # what the run logged, of all its starts
LOCK = ".lock"
LAUNCH = ".launch"  # which launch started the run
CHECKPOINTS = "checkpoints"  # 000100, 000200, ..., last
VIDEOS = "videos"
PRETRAINED = "pretrained_model"  # of a checkpoint: the policy in LeRobot's format
POLICY_CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TRAINING_STATE = "training_state"  # of a checkpoint: what resuming needs besides the policy
SHARDS = "sharded"  # of the training state: each rank's part of the tensors
MANIFEST = (
    f"{TRAINING_STATE}/manifest.json"  # of a checkpoint: written last, so a folder that has it is complete
)


def sent_file(folder: Path, tracker: str) -> Path:
    """How many lines of the metrics a tracker has got."""
    return folder / f".sent-{tracker}.json"
