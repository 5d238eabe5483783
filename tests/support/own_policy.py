"""The text of a small policy of a user's own: the settings that every such policy needs, and what a test adds."""


def own_policy(body: str, settings: str = "") -> str:
    """`body` is that of the class Own(Policy), `settings` are further fields of its config; both are indented."""
    return f"""
from dataclasses import dataclass
import torch
from flexor import Loss, Policy, PolicyConfig

@dataclass
class Config(PolicyConfig):
{settings}
    def optimizer_preset(self):
        return {{"type": "adamw", "lr": 1e-2}}
    @property
    def action_deltas(self):
        return [0]
    @property
    def action_steps(self):
        return 1

class Own(Policy):
    Config = Config
    def __init__(self, config):
        super().__init__(config)
{body}"""
