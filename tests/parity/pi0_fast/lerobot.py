"""LeRobot's pi0-FAST at small sizes, with a FAST processor that loads without the Hub."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from parity import lerobot_side
from parity.pi0.small import GEMMA, VISION, WIDTHS
from parity.pi0_fast.cases import TINY, WORDS, forgotten, recorded, sequences, training_batch
from parity.records import saved_weights

MODELING = "lerobot.policies.pi0_fast.modeling_pi0_fast"


class FastProcessor:
    """What LeRobot uses of `physical-intelligence/fast`, written down from its description."""

    def __init__(self, folder: str):
        from transformers import PreTrainedTokenizerFast

        settings = json.loads((Path(folder) / "processor_config.json").read_text())
        self.scale, self.min_token = settings["scale"], settings["min_token"]
        self.bpe_tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json")

    @classmethod
    def from_pretrained(cls, folder: str, **_: object) -> "FastProcessor":
        return cls(folder)

    def __call__(self, chunks: torch.Tensor) -> list[list[int]]:
        from scipy.fft import dct

        tokens = []
        for rows in np.around(dct(chunks.numpy(), axis=1, norm="ortho") * self.scale):
            codes = np.maximum(rows.flatten() - self.min_token, 0).astype(int)
            tokens.append(self.bpe_tokenizer("".join(map(chr, codes)))["input_ids"])
        return tokens


@contextmanager
def prepared(folder: Path) -> Iterator[None]:
    """Inside, policies are small. LeRobot's supports no other size of images than 224 unless it is made to."""
    modeling = import_module(MODELING)

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
        vision.projection_dim, vision.image_size = text.hidden_size, TINY["image_resolution"][0]
        text.vocab_size = len(WORDS)
        return make(config)

    with ExitStack() as stack:
        name = "PaliGemmaForConditionalGenerationWithPiGemma"
        stack.enter_context(patch.object(modeling, name, partial(paligemma, getattr(modeling, name))))
        stack.enter_context(patch.object(modeling, "get_gemma_config", size))
        for module in (MODELING, "lerobot.processor.tokenizer_processor"):
            stack.enter_context(patch(f"{module}.AutoProcessor", FastProcessor))
        stack.enter_context(forgotten(import_module(module).ActionTokenizerProcessorStep, folder))
        yield


def measure(case: dict) -> dict:
    with prepared(case["folder"]):
        record = lerobot_side.measure_policy("pi0_fast", case)
        made = lerobot_side.make_policy("pi0_fast", case)
        batch = lerobot_side.tensors(training_batch(case))
        record["words"] = recorded(lerobot_side.training_batch(made, batch))
        with tempfile.TemporaryDirectory() as folder:
            made.policy.save_pretrained(Path(folder))
            record["file"] = saved_weights(Path(folder) / "model.safetensors")
            settings = json.loads((Path(folder) / "config.json").read_text())
        steps = [[type(step)._registry_name for step in pipeline.steps] for pipeline in made[1:]]
        record["steps"], record["settings"] = steps, sorted(settings)
        if "action_scale" in case:
            steps, values = (chunks := batch["action"]).shape[1:]
            [tokens, *_] = made.policy.action_tokenizer(chunks)
            record["decoded"] = made.policy.decode_actions_with_fast(
                sequences(tokens), steps, values
            ).tolist()
    return record


def training(policy: Any) -> AbstractContextManager:
    return nullcontext()


def acting(policy: Any, moment: str) -> AbstractContextManager:
    """In training, what is read does not see the beginning of what is written. LeRobot lets it when it acts."""
    made = policy.model._create_custom_attention_mask_fast

    def mask(*args: Any) -> torch.Tensor:
        out = made(*args)
        out[:, :-1, -1] = False
        return out

    return patch.object(policy.model, "_create_custom_attention_mask_fast", mask)
