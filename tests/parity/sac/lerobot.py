"""What LeRobot's SAC computes, and how it is made to draw what ours draws."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from parity import lerobot_side
from parity.fill import Draws
from parity.inputs import observation
from parity.records import values
from parity.sac.cases import UPDATES, fill_policy, fill_state, norms, transitions

NORMAL = "torch.distributions.multivariate_normal._standard_normal"


def settings(values: dict) -> dict:
    from lerobot.policies.gaussian_actor.configuration_gaussian_actor import (
        ActorNetworkConfig,
        CriticNetworkConfig,
        PolicyConfig,
    )

    networks = {
        "actor_network_kwargs": ActorNetworkConfig,
        "policy_kwargs": PolicyConfig,
        "discrete_critic_network_kwargs": CriticNetworkConfig,
        "critic_network_kwargs": CriticNetworkConfig,
    }
    return {name: networks[name](**value) if name in networks else value for name, value in values.items()}


@contextmanager
def drawing(moment: str, names: Sequence[str]) -> Iterator[None]:
    """The Gaussian draws under these names, one after the other; critics are chosen as ours chooses them."""
    draws, remaining = Draws(moment), iter(names)
    batches = iter(range(100))

    def normal(shape: Any, dtype: object, device: object) -> torch.Tensor:
        return draws.normal(next(remaining), tuple(shape))

    def randperm(count: int) -> torch.Tensor:
        return draws.uniform(f"{next(batches)}/critics", (1, count))[0].argsort()

    with patch(NORMAL, normal), patch("torch.randperm", randperm):
        yield


@contextmanager
def acting(policy: Any, moment: str) -> Iterator[None]:
    """Without noise, as ours acts."""
    with patch(NORMAL, lambda shape, dtype, device: torch.zeros(shape)):
        yield


def make(case: dict) -> tuple:
    from lerobot.rl.algorithms.sac import SACAlgorithm, SACAlgorithmConfig

    made = lerobot_side.make_policy("sac", case)
    config = SACAlgorithmConfig.from_policy_config(made.policy.config)
    for name, value in settings(case["algorithm"]).items():
        if name != "penalty":
            setattr(config, name, value)
    algorithm = SACAlgorithm(policy=made.policy, config=config)
    made.policy.eval()
    return made, algorithm


def batch_of(case: dict, made: Any, number: int) -> dict:
    raw = transitions(case, number)
    batch = {key: torch.from_numpy(raw[key]) for key in ("action", "reward", "done")}
    for key in ("state", "next_state"):
        batch[key] = made.before.process_observation(lerobot_side.tensors(raw[key]))
    if case["algorithm"].get("penalty"):
        batch["complementary_info"] = {"discrete_penalty": torch.from_numpy(raw["penalty"])}
    return batch


def measure(case: dict) -> dict:
    made, algorithm = make(case)
    policy = made.policy
    record: dict = {
        "parameters": [fill_policy(policy), fill_state(algorithm.state_dict())],
        "out": acts(case, made),
    }
    batch = algorithm._prepare_forward_batch(batch_of(case, made, 0))
    losses = {
        "critic": (algorithm._compute_loss_critic, ["0/next action"]),
        "actor": (algorithm._compute_loss_actor, ["0/actor action"]),
        "temperature": (algorithm._compute_loss_temperature, ["0/temperature action"]),
    }
    if policy.discrete_critic is not None:
        losses["discrete_critic"] = (algorithm._compute_loss_discrete_critic, [])
    trained = {
        "critic": {
            **named(algorithm.critic_ensemble.critics, "critic_ensemble.critics."),
            **named(policy.encoder_critic, "encoder_critic."),
        },
        "actor": actor_parameters(policy),
        "temperature": {"log_alpha": algorithm.log_alpha},
        "discrete_critic": {} if policy.discrete_critic is None else named(policy.discrete_critic, ""),
    }
    record["loss"], record["gradients"] = {}, {}
    for part, (compute, names) in losses.items():
        with drawing("training", names):
            loss = compute(batch)
        gradients = torch.autograd.grad(loss, [*trained[part].values()])
        record["loss"][part] = loss.item()
        record["gradients"][part] = norms(dict(zip(trained[part], gradients)))
    if case["updates"]:
        record["target"] = after_updates(case, made, algorithm)
    return record


def named(module: Any, prefix: str) -> dict:
    return {prefix + name: parameter for name, parameter in module.named_parameters()}


def actor_parameters(policy: Any) -> dict:
    shared = policy.shared_encoder
    return {n: p for n, p in policy.actor.named_parameters() if not (shared and n.startswith("encoder."))}


def acts(case: dict, made: Any) -> list:
    batch = made.before.process_observation(lerobot_side.tensors(observation(case["inputs"], "acting")))
    with drawing("acting", ["action"]):
        return values(made.policy.select_action(batch))


def after_updates(case: dict, made: Any, algorithm: Any) -> dict:
    algorithm.make_optimizers_and_scheduler()
    count, every = algorithm.config.utd_ratio, algorithm.config.policy_update_freq
    for update in range(UPDATES):
        batches = iter([batch_of(case, made, update * count + number) for number in range(count)])
        names = [f"{number}/next action" for number in range(count)]
        for number in range(every if update % every == 0 else 0):
            names += [f"{number}/actor action", f"{number}/temperature action"]
        with drawing(f"update {update}", names):
            algorithm.update(batches)
    return norms({**made.policy.state_dict(), **algorithm.state_dict()})
