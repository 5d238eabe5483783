"""What of a policy's processing the loader does, what is left for the device, and that both together are all of it."""

import threading
from dataclasses import dataclass

import pytest
import torch

from flexor.core.batch import ACTION, SAMPLE_ID, STATE
from flexor.core.rng import Noise
from flexor.data.loader.assemble import HeldBack
from flexor.data.settings import ImageTransformsConfig
from flexor.policies.augment.step import AugmentImages, augmented
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.processing.host_steps import split_processing
from flexor.policies.processing.normalize import Normalize, NormalizeByDataset
from flexor.policies.processing.pipeline import ACTING, Pipeline, ProcessingStep, StepContext
from flexor.policies.processing.relative_actions import RelativeActions
from flexor.policies.processing.rename_and_move import RenameObservations, ToBatch, ToDevice
from flexor.policies.processing.tokenize import TASK_TOKENS, Tokenize
from support.tokenizers import make_tokenizer

TOP, WRIST = "observation.images.top", "observation.images.wrist"
FEATURES = {
    STATE: PolicyFeature(Kind.STATE, (2,)),
    TOP: PolicyFeature(Kind.VISUAL, (3, 8, 8)),
    WRIST: PolicyFeature(Kind.VISUAL, (3, 8, 8)),
    ACTION: PolicyFeature(Kind.ACTION, (2,)),
}
CONTEXT = StepContext(training=True, noise=Noise(5, 7, torch.tensor([3, 8])))


@dataclass
class StateInTask(ProcessingStep):
    """Words about a normalised state."""

    on_host = True
    uses_images = False

    def __call__(self, batch, context=ACTING):
        return {**batch, "task": [f"{row[0]:.3f}" for row in batch[STATE].tolist()]}


@dataclass
class CutPatches(ProcessingStep):
    """Flat patches of the top camera, and where they are."""

    on_host = True
    size: int = 4

    def __call__(self, batch, context=ACTING):
        images = batch[TOP]
        patches = images.unfold(2, self.size, self.size).unfold(3, self.size, self.size)
        patches = patches.permute(0, 2, 3, 1, 4, 5).flatten(1, 2).flatten(2)
        positions = torch.arange(patches.shape[1]).expand(len(images), -1)
        rest = {name: value for name, value in batch.items() if name != TOP}
        return {**rest, "patches": patches, "positions": positions}


def stats(factor: float = 1.0) -> dict:
    vector = {"mean": [0.5 * factor, 1.0], "std": [2.0, 3.0 * factor]}
    image = {"mean": [[[0.3]]] * 3, "std": [[[0.2 * factor]]] * 3}
    return {STATE: vector, ACTION: vector, TOP: image, WRIST: image}


def normalizer(factor: float = 1.0) -> Normalize:
    return Normalize(FEATURES, dict.fromkeys(("VISUAL", "STATE", "ACTION"), "MEAN_STD"), stats(factor))


def batch() -> dict:
    return {
        STATE: torch.tensor([[1.0, -2.0], [0.5, 3.0]]),
        "observation.images.one": torch.arange(384, dtype=torch.int64).remainder(256).byte().view(2, 3, 8, 8),
        WRIST: torch.arange(384, dtype=torch.int64).remainder(255).byte().view(2, 3, 8, 8),
        ACTION: torch.tensor([[[1.0, 2.0]] * 3, [[3.0, -4.0]] * 3]),
        SAMPLE_ID: torch.tensor([3, 8]),
        "/dataset": torch.tensor([1, 0]),
        "task": ["a", "b"],
    }


RENAME = RenameObservations({"observation.images.one": TOP})
AUGMENT = AugmentImages(ImageTransformsConfig(enable=True), {TOP: FEATURES[TOP], WRIST: FEATURES[WRIST]})
CASES = {
    "words of a normalised state": [
        RENAME,
        ToBatch(),
        RelativeActions(True),
        normalizer(),
        StateInTask(),
        ToDevice(),
    ],
    "of several datasets": [
        RENAME,
        NormalizeByDataset(normalizer(), [normalizer(), normalizer(2.0)]),
        StateInTask(),
        ToDevice(),
    ],
    "after the move": [RENAME, ToDevice(), normalizer(), StateInTask()],
    "augmented": augmented(
        Pipeline("", [RENAME, ToBatch(), normalizer(), StateInTask(), ToDevice()]), AUGMENT
    ).steps,
    "words first": [RENAME, StateInTask(), ToDevice(), normalizer()],
    "patches": [RENAME, CutPatches(), ToDevice(), normalizer()],
    "patches of augmented images": [RENAME, ToDevice(), AUGMENT, normalizer(), CutPatches()],
    "nothing on the host": [RENAME, ToBatch(), ToDevice(), normalizer()],
}


@pytest.mark.parametrize("case", CASES)
def test_both_parts_together_are_bitwise_the_pipeline(case):
    pipeline = Pipeline("before", CASES[case])
    expected = pipeline(batch(), CONTEXT)
    host, device = split_processing(pipeline, seed=5)
    processed = batch()
    if host is not None:
        images = {name: value for name, value in processed.items() if name.startswith("observation.image")}
        if not host.uses_images:
            processed |= {name: HeldBack(value) for name, value in images.items()}
        processed = host(processed, step=7)
        processed = {n: v.images if isinstance(v, HeldBack) else v for n, v in processed.items()}
    processed = device(processed, CONTEXT)
    assert not any(step.on_host for step in device.steps)
    assert (host is None) == (case == "nothing on the host")
    assert host is None or host.uses_images == case.startswith("patches")
    assert processed.keys() == expected.keys() and processed["task"] == expected["task"]
    for name, value in expected.items():
        assert not isinstance(value, torch.Tensor) or torch.equal(processed[name], value), name


def test_the_loader_moves_nothing_to_the_gpu():
    for steps in (CASES["after the move"], CASES["patches of augmented images"]):
        pipeline = Pipeline("before", steps).to("meta")
        host, device = split_processing(pipeline)
        assert [step.device for step in host.pipeline.steps if isinstance(step, ToDevice)] == ["cpu"]
        assert [step.device for step in device.steps if isinstance(step, ToDevice)] == ["meta"]
        pipeline.to("cpu")


def test_threads_share_a_tokenizer(tmp_path):
    """Whose padding depends on the call."""
    pytest.importorskip("transformers")
    step = Tokenize(str(make_tokenizer(tmp_path)), max_length=20, padding="longest")
    learning = StepContext(training=True)
    shapes: dict[str, set[int]] = {"training": set(), "acting": set()}
    failures: list[BaseException] = []

    def tokenize(kind: str, context: StepContext) -> None:
        try:
            for _ in range(200):
                shapes[kind].add(step({"task": ["open", "pick up"]}, context)[TASK_TOKENS].shape[1])
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=tokenize, args=each)
        for each in (("training", learning), ("acting", ACTING), ("training", learning))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and shapes == {"training": {20}, "acting": {3}}
