"""The keys of a batch, shared by data, policies and environments. They are LeRobot's names."""

from typing import Any

Batch = dict[str, Any]

ACTION = "action"
STATE = "observation.state"
ENV_STATE = "observation.environment_state"
IMAGE_PREFIX = "observation.image"
REWARD = "next.reward"
SAMPLE_ID = "index"

# State that a policy carries between calls: a dictionary that the actor stores and clears at each episode. A
# policy that gets no memory behaves as at the start of an episode.
MEMORY = "memory"

# Mean number of actions per sample that are not padding, over the whole *global* batch. The loader
# adds it. A loss divided by it does not depend on how the batch is split over ranks.
VALID_STEPS = "action_valid_steps"
