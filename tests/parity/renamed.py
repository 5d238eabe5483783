"""Names of observations that a run changes, both ways: `--rename_map` of either program, read by the other.

Called by run.py. The policy is an ACT, trained on the built-in task under other names than the task has.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from flexor.policies.pretrained import load_pretrained
from flexor.policies.processing.rename_and_move import renaming_of
from parity.exchange_flexor import FLEXOR, IMAGE_SIZE, Exchange, observations
from parity.limits import Row

MAP = {"observation.image": "observation.images.front"}


def rows(lerobot: Path, folder: Path) -> Iterator[Row]:
    exchange = Exchange("act", lerobot, folder)
    exchange.run(*FLEXOR, "record", "data", "--episodes=3", f"--image-size={IMAGE_SIZE}")
    observed = observations()
    rename = f"--rename_map={json.dumps(MAP)}"
    ours = exchange.flexor_train("ours", *exchange.arguments(exchange.settings.TRAINED), rename)
    yield Row("renamed here, acts there", exchange.compare({ours: observed}))
    theirs = exchange.lerobot_train("theirs", f"--policy.path={ours}", rename, steps=2)
    check_names(theirs)
    yield Row("lerobot-train --rename_map, acts here", exchange.compare({theirs: observed}))
    resumed = exchange.resume_there("ours")
    check_names(resumed)
    yield Row("lerobot-train --resume of ours renamed, acts here", exchange.compare({resumed: observed}))
    onwards = exchange.flexor_train("onwards", f"--policy.path={theirs}", rename, steps=2)
    check_names(onwards)
    yield Row("flexor train --rename_map of theirs, acts there", exchange.compare({onwards: observed}))


def check_names(checkpoint: Path) -> None:
    policy = load_pretrained(str(checkpoint))
    assert renaming_of(policy.preprocessor) == MAP
    assert list(policy.policy.config.images) == list(MAP.values())
