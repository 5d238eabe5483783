"""The names of what is in a batch, which data, policies and environments agree on (they are LeRobot's)."""

from typing import Any

Batch = dict[str, Any]

ACTION = "action"
STATE = "observation.state"
ENV_STATE = "observation.environment_state"
IMAGE_PREFIX = "observation.image"
REWARD = "next.reward"
SAMPLE_ID = "index"

# State that a policy carries between calls: tensors [B, ...] by name. A session keeps them for it and clears them each
# episode. A policy that gets none behaves as at the start of an episode.
MEMORY = "memory"

# Mean number of actions per sample that are not padding, over the whole *global* batch. The loader
# adds it, so that a loss divided by it is the same however the batch is spread over ranks.
VALID_STEPS = "action_valid_steps"

# Where in its global batch each sample is, from 0 to below 1 [B]. Only policies that ask for it get it, in training.
BATCH_PLACE = "/batch_place"
# Columns that Flexor adds to a dataset. LeRobot allows no slash in names, so no feature has these.
# Weight of each sample in the loss [B].
SAMPLE_WEIGHT = "/sample_weight"
# Several datasets: which of them each sample is from [B].
DATASET_NUMBER = "/dataset"
# What a frozen encoder has made of a camera's images, instead of them: this, and the policy's name of the camera.
IMAGE_FEATURES = "/image_features/"
# Several datasets whose actions have different lengths: the length of each sample's [B]; the rest is padding.
ACTION_LENGTH = "/action_length"
