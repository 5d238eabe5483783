"""Our pi0-FAST at small sizes."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from torch import Tensor

from flexor.policies.nn.fast_tokens import load_fast_tokenizer
from flexor.policies.nn.siglip import SiglipSize
from flexor.policies.pi0_fast.action_tokens import TokenizeActions
from flexor.policies.pretrained import as_lerobot, save_weights
from flexor.policies.vlm.paligemma import PaliGemmaSize, gemma
from parity import flexor_side
from parity.inputs import TASKS
from parity.pi0.small import GEMMA, VISION, WIDTHS
from parity.pi0_fast.cases import WORDS, forgotten, recorded, sequences, training_batch
from parity.records import saved_weights


def mean_over_tokens(token_losses: Tensor, mask: Tensor) -> Tensor:
    """LeRobot's: over all tokens of the batch."""
    return (token_losses * mask).sum(1) * len(mask) / mask.sum()


@contextmanager
def prepared(folder: Path) -> Iterator[None]:
    """Inside, policies are small."""
    rest = [GEMMA[name] for name in ("depth", "mlp", "heads", "kv_heads", "head_dim")]
    sizes = {name: gemma(width, *rest) for name, width in WIDTHS.items()}
    vision = SiglipSize(*VISION.values())
    vlm_sizes = {name: PaliGemmaSize(size, vision, len(WORDS)) for name, size in sizes.items()}
    with (
        patch.dict("flexor.policies.vlm.paligemma.GEMMA", sizes),
        patch.dict("flexor.policies.vlm.paligemma.PALIGEMMA", vlm_sizes),
        patch("flexor.policies.pi0_fast.policy.mean_over_tokens", mean_over_tokens),
        forgotten(TokenizeActions, folder),
    ):
        yield


def measure(case: dict) -> dict:
    with prepared(case["folder"]):
        record = flexor_side.measure_policy("pi0_fast", case)
        made = flexor_side.make_policy("pi0_fast", case)
        batch = made.preprocessor({**flexor_side.tensors(training_batch(case)), "task": TASKS})
        record["words"] = recorded(batch)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "weights"
            save_weights("pi0_fast", made.policy.state_dict(), file)
            record["file"] = saved_weights(file)
        pipelines = (made.preprocessor, made.postprocessor)
        record["steps"] = [[step.name for step in pipeline.steps] for pipeline in pipelines]
        record["settings"] = sorted(as_lerobot(made.policy.config))
        if "action_scale" in case:
            steps, values = (chunks := training_batch(case)["action"]).shape[1:]
            fast = load_fast_tokenizer(made.policy.config.action_tokenizer_name)
            [tokens, *_] = fast.encode(chunks)
            record["decoded"] = fast.decode(sequences(tokens), steps, values).actions.tolist()
    return record
