"""Names of the files and folders of a run."""

RUN_CONFIG = "config.yaml"  # all settings of the run
METRICS = "metrics.jsonl"
LOCK = ".lock"
LAUNCH = ".launch"  # who started the run
CHECKPOINTS = "checkpoints"  # 000100, 000200, ..., last
VIDEOS = "videos"
PRETRAINED = "pretrained_model"  # of a checkpoint: LeRobot's folder, a policy to use
POLICY_CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TRAINING_STATE = "training_state"  # of a checkpoint: what resuming needs besides
SHARDS = "sharded"  # of the training state: each rank's part of the tensors
