"""Reward classifiers exchanged both ways: each program saves some, and says of images what the other's say.

Called by run.py; LeRobot's side is `python -m parity.classifier FOLDER`, in LeRobot's environment.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from parity.limits import Row
from parity.records import difference
from parity.reward_classifier.cases import CASES, fill_policy, images

KIND = "reward_classifier"


def rows(lerobot: Path, folder: Path) -> Iterator[Row]:
    from flexor.policies.pretrained import load_pretrained, save_pretrained
    from flexor.policies.weight_names import unique_state
    from parity import flexor_side
    from parity.kinds import cases_of

    for name, case in cases_of(KIND, folder).items():
        made = flexor_side.make_policy(KIND, case)
        fill_policy(made.policy)
        state = unique_state(made.policy)
        save_pretrained(
            folder / "here" / name, made.policy.config, state, made.preprocessor, made.postprocessor
        )
    done = subprocess.run(
        [lerobot, "-m", "parity.classifier", folder], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-3000:])
    for writer in ("here", "there"):
        far = 0.0
        for name, case in CASES.items():
            pretrained = load_pretrained(str(folder / writer / name))
            batch = pretrained.preprocessor(flexor_side.tensors(images(case)))
            with torch.no_grad():
                ours = pretrained.policy.logits(batch).tolist()
            far = max(far, difference(ours, json.loads((folder / writer / name / "logits.json").read_text())))
        yield Row(f"{KIND}: saved {writer}, classifies in both", far)


def main(folder: Path) -> None:
    """In LeRobot: save each case, and classify with what both programs have saved."""
    from lerobot.processor import PolicyProcessorPipeline
    from lerobot.rewards.classifier import Classifier

    from parity import lerobot_side
    from parity.reward_classifier.lerobot import make, own_encoder

    for name, case in CASES.items():
        model, *processors = make(case)
        fill_policy(model)
        for piece in (model, *processors):
            piece.save_pretrained(folder / "there" / name)
        for writer in ("here", "there"):
            saved = folder / writer / name
            with own_encoder():
                loaded = Classifier.from_pretrained(saved, strict=True)
            before = PolicyProcessorPipeline.from_pretrained(
                saved, config_filename="classifier_preprocessor.json"
            )
            batch = before(lerobot_side.tensors(images(case)))
            with torch.no_grad():
                logits = loaded.predict([batch[key] for key in case["inputs"]]).logits
            assert np.isfinite(logits.numpy()).all()
            (saved / "logits.json").write_text(json.dumps(logits.tolist()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
