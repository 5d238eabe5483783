"""LeRobot's pi0 at small sizes, made to draw what ours draws."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from parity import lerobot_side
from parity.fill import Draws
from parity.inputs import BATCH
from parity.pi0.cases import is_head
from parity.pi0.small import GEMMA, VISION, WIDTHS, WORDS
from parity.records import group, saved_weights


@contextmanager
def prepared(folder: Path, kind: str = "pi0") -> Iterator[None]:
    """Inside, policies are small, and `folder` holds their tokenizer."""
    modeling = import_module(f"lerobot.policies.{kind}.modeling_{kind}")
    processor = import_module(f"lerobot.policies.{kind}.processor_{kind}")

    def size(variant: str) -> Any:
        rest = {
            ("mlp_dim" if name == "mlp" else f"num_{name}" if "heads" in name else name): value
            for name, value in GEMMA.items()
        }
        return modeling.GemmaConfig(width=WIDTHS[variant], **rest)

    def paligemma(make: Callable, config: Any) -> Any:
        vision, text = config.vision_config, config.text_config
        vision.hidden_size, vision.num_hidden_layers = VISION["width"], VISION["depth"]
        vision.intermediate_size, vision.num_attention_heads = VISION["mlp"], VISION["heads"]
        vision.projection_dim = text.hidden_size
        text.vocab_size = len(WORDS)
        return make(config)

    def expert(make: Callable, config: Any) -> Any:
        config.vocab_size = len(WORDS)
        return make(config)

    with ExitStack() as stack:
        replace = partial(patch.object, modeling)
        for name, change in (
            ("PaliGemmaForConditionalGenerationWithPiGemma", paligemma),
            ("PiGemmaForCausalLM", expert),
        ):
            stack.enter_context(replace(name, partial(change, getattr(modeling, name))))
        stack.enter_context(replace("get_gemma_config", size))
        tokenizer = processor.TokenizerProcessorStep
        stack.enter_context(
            patch.object(
                processor,
                "TokenizerProcessorStep",
                lambda tokenizer_name, **settings: tokenizer(tokenizer_name=str(folder), **settings),
            )
        )
        yield


def measure(case: dict, kind: str = "pi0") -> dict:
    with prepared(case["folder"], kind):
        record = lerobot_side.measure_policy(kind, case)
        made = lerobot_side.make_policy(kind, case)
        with tempfile.TemporaryDirectory() as folder:
            made.policy.save_pretrained(Path(folder))
            record["file"] = saved_weights(Path(folder) / "model.safetensors")
            settings = json.loads((Path(folder) / "config.json").read_text())
        steps = [[type(step)._registry_name for step in pipeline.steps] for pipeline in made[1:]]
        record["steps"], record["settings"] = steps, sorted(settings)
    return record


def groups(policy: Any) -> list:
    """All parameters are given to the optimizer, of which the heads have no counterpart here."""
    used = [value for name, value in policy.named_parameters() if not is_head(name)]
    assert len(list(policy.get_optim_params())) == len(used) + 2
    return [group(policy, used, {})]


@contextmanager
def drawing(policy: Any, moment: str, name: str) -> Iterator[None]:
    draws = Draws(moment)

    def noise(shape: tuple, device: object) -> torch.Tensor:
        return draws.normal(name, shape)

    with (
        patch(f"{type(policy).__module__}.sample_noise", noise),
        patch("torch.distributions.Beta.sample", lambda *_: draws.uniform("time", (BATCH,))),
    ):
        yield


def training(policy: Any) -> AbstractContextManager:
    return drawing(policy, "training", "noise")


def acting(policy: Any, moment: str) -> AbstractContextManager:
    return drawing(policy, moment, "x")


def gradients(policy: Any) -> list[float | None]:
    """None also for the queries of the prompt's last layer, which play no part: their gradient is zero."""
    norms: dict[str, float | None] = {
        name: None if p.grad is None else p.grad.double().norm().item()
        for name, p in policy.named_parameters()
        if not is_head(name)
    }
    last = f"language_model.layers.{GEMMA['depth'] - 1}.self_attn.q_proj.weight"
    (unused,) = (name for name in norms if name.endswith(last))
    assert not norms[unused]
    return [None if name == unused else norm for name, norm in norms.items()]
