"""What our SAC computes: losses, their gradients, what it does, and its weights after some updates."""

import torch

from flexor.policies.sac.algorithm import SACAlgorithm, TransitionBatch
from flexor.policies.sac.config import ActorNetwork, CriticNetwork, GaussianHead
from flexor.policies.sac.settings import SACSettings
from parity import flexor_side
from parity.fill import Draws
from parity.inputs import observation
from parity.records import values
from parity.sac.cases import UPDATES, fill_policy, fill_state, norms, transitions

NETWORKS = {
    "actor_network_kwargs": ActorNetwork,
    "policy_kwargs": GaussianHead,
    "discrete_critic_network_kwargs": CriticNetwork,
    "critic_network_kwargs": CriticNetwork,
}


def settings(values: dict) -> dict:
    return {name: NETWORKS[name](**value) if name in NETWORKS else value for name, value in values.items()}


def make(case: dict) -> tuple:
    pretrained = flexor_side.make_policy("sac", case)
    chosen = settings({name: value for name, value in case["algorithm"].items() if name != "penalty"})
    algorithm = SACAlgorithm(pretrained.policy.eval(), SACSettings(**chosen)).eval()
    return pretrained, algorithm


def batch_of(case: dict, pretrained, number: int) -> TransitionBatch:
    raw = transitions(case, number)
    state, next_state = (
        pretrained.preprocessor(flexor_side.tensors(raw[key])) for key in ("state", "next_state")
    )
    action, reward, done, penalty = (
        torch.from_numpy(raw[key]) for key in ("action", "reward", "done", "penalty")
    )
    return TransitionBatch(
        state, action, reward, next_state, done, penalty if case["algorithm"].get("penalty") else None
    )


def measure(case: dict) -> dict:
    pretrained, algorithm = make(case)
    policy = pretrained.policy
    record: dict = {
        "parameters": [fill_policy(policy), fill_state(algorithm.state_dict())],
        "out": acts(case, pretrained),
    }
    batch, noise = batch_of(case, pretrained, 0), Draws("training")
    losses = {
        "critic": algorithm.critic_loss,
        "actor": algorithm.actor_loss,
        "temperature": algorithm.temperature_loss,
    }
    if policy.discrete_critic is not None:
        losses["discrete_critic"] = algorithm.discrete_critic_loss
    trained = {
        "critic": {
            **named(algorithm.critic_ensemble, "critic_ensemble."),
            **named(policy.encoder_critic, "encoder_critic."),
        },
        "actor": actor_parameters(policy),
        "temperature": {"log_alpha": algorithm.log_alpha},
        "discrete_critic": {} if policy.discrete_critic is None else named(policy.discrete_critic, ""),
    }
    record["loss"], record["gradients"] = {}, {}
    for part, compute in losses.items():
        loss = compute(batch, noise)
        gradients = torch.autograd.grad(loss, [*trained[part].values()])
        record["loss"][part] = loss.item()
        record["gradients"][part] = norms(dict(zip(trained[part], gradients)))
    if case["updates"]:
        record["target"] = after_updates(case, pretrained, algorithm)
    return record


def named(module: torch.nn.Module, prefix: str) -> dict:
    return {prefix + name: parameter for name, parameter in module.named_parameters()}


def actor_parameters(policy) -> dict:
    """Without those of a shared encoder, which the actor's loss does not train."""
    shared = policy.config.shared_encoder
    return {n: p for n, p in policy.actor.named_parameters() if not (shared and n.startswith("encoder."))}


def acts(case: dict, pretrained) -> list:
    """What it does in training: random actions, for the same numbers."""
    batch = pretrained.preprocessor(flexor_side.tensors(observation(case["inputs"], "acting")))
    with torch.no_grad():
        return values(pretrained.policy.explore(batch, Draws("acting")))


def after_updates(case: dict, pretrained, algorithm: SACAlgorithm) -> dict:
    algorithm.make_optimizers()
    count = algorithm.settings["utd_ratio"]
    for update in range(UPDATES):
        batches = [batch_of(case, pretrained, update * count + number) for number in range(count)]
        algorithm.update(batches, Draws(f"update {update}"), update)
    return norms({**pretrained.policy.state_dict(), **algorithm.state_dict()})
