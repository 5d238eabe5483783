"""Our pi0 at small sizes. What LeRobot draws from the beta distribution is given; ours is tested on its own."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from flexor.policies.nn.siglip import SiglipSize
from flexor.policies.pretrained import as_lerobot, save_weights
from flexor.policies.vlm.paligemma import PaliGemmaSize, gemma
from parity import flexor_side
from parity.inputs import BATCH
from parity.pi0.small import GEMMA, VISION, WIDTHS, WORDS
from parity.records import saved_weights


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
        patch("flexor.policies.nn.flow.beta", lambda noise, name, *_: noise.uniform(name, (BATCH,))),
    ):
        yield


def measure(case: dict, kind: str = "pi0") -> dict:
    with prepared(case["folder"]):
        record = flexor_side.measure_policy(kind, case)
        made = flexor_side.make_policy(kind, case)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "weights"
            save_weights(kind, made.policy.state_dict(), file)
            record["file"] = saved_weights(file)
        pipelines = (made.preprocessor, made.postprocessor)
        record["steps"] = [[step.name for step in pipeline.steps] for pipeline in pipelines]
        record["settings"] = sorted(as_lerobot(made.policy.config))
    return record
