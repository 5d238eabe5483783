"""Simulation: the built-in task and its expert, rollouts, and adapters for gymnasium environments."""

import gymnasium

from flexor.sim.task import ENV_ID, TIME_LIMIT

if ENV_ID not in gymnasium.registry:
    gymnasium.register(ENV_ID, entry_point="flexor.sim.task:PlaceEnv", max_episode_steps=TIME_LIMIT)
