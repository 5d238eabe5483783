"""Processing: normalisation and its inverse, saving and loading, refusals that name what is wrong."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from flexor.core.batch import ACTION, STATE
from flexor.core.errors import CheckpointError, ConfigError
from flexor.core.rng import Noise
from flexor.policies.act.config import ACTConfig
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.processing.normalize import Normalize, Unnormalize
from flexor.policies.processing.pipeline import (
    ACTING,
    PREPROCESSOR,
    Pipeline,
    ProcessingStep,
    StepContext,
    processing_step,
)
from flexor.policies.processing.rename_and_move import RenameObservations, ToBatch, ToDevice
from flexor.policies.processing.tokenize import TASK_MASK, TASK_TOKENS, Tokenize

MODES = ["IDENTITY", "MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10"]
FEATURES = {
    "observation.state": PolicyFeature(Kind.STATE, (2,)),
    "observation.images.top": PolicyFeature(Kind.VISUAL, (3, 4, 5)),
}
OUTPUTS = {"action": PolicyFeature(Kind.ACTION, (2,))}


def statistics(*, without: str = "") -> dict:
    vector = {"min": -1, "q01": -0.5, "q10": -0.25, "mean": 0.5, "std": 2, "q90": 2, "q99": 3, "max": 4}
    vector = {name: value for name, value in vector.items() if name != without}
    wide = {name: [float(value), value * 2.0] for name, value in vector.items()}
    image = {name: [[[value / 4]]] * 3 for name, value in vector.items()}
    return {"observation.state": wide, "observation.images.top": image, "action": wide}


def pipelines(mode: str = "MEAN_STD", stats: dict | None = None) -> tuple[Pipeline, Pipeline]:
    modes = dict.fromkeys(("VISUAL", "STATE", "ACTION"), mode)
    config = ACTConfig(input_features=FEATURES, output_features=OUTPUTS, normalization_mapping=modes)
    return config.pipelines(stats or statistics(), "cpu")


def batch() -> dict:
    return {
        "observation.state": torch.tensor([[1.0, -2.0], [0.5, 3.0]]),
        "observation.images.top": torch.arange(120, dtype=torch.uint8).reshape(2, 3, 4, 5),
        "action": torch.tensor([[[1.0, 2.0]] * 3, [[3.0, -4.0]] * 3]),
        "action_is_pad": torch.zeros(2, 3, dtype=torch.bool),
        "task": ["a", "b"],
    }


@pytest.mark.parametrize("mode", MODES)
def test_what_is_normalised_comes_back(mode):
    before, after = pipelines(mode)
    normalised = before(batch())["action"]
    assert torch.equal(normalised, batch()["action"]) == (mode == "IDENTITY")
    torch.testing.assert_close(after({"action": normalised})["action"], batch()["action"])


@pytest.mark.parametrize(("mode", "low", "high"), [("MIN_MAX", -1, 4), ("QUANTILES", -0.5, 3)])
def test_bounds_become_minus_one_and_one(mode, low, high):
    before, _ = pipelines(mode)
    ends = {"observation.state": torch.tensor([[low, 2.0 * low], [high, 2.0 * high]])}
    torch.testing.assert_close(before(ends)["observation.state"], torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))


@pytest.mark.parametrize("mode", MODES[1:])
def test_what_never_changes_stays_finite(mode):
    constant = {name: [0.0 if name == "std" else 0.5] * 2 for name in statistics()["action"]}
    stats = {"observation.state": constant}
    step = Normalize({"observation.state": FEATURES["observation.state"]}, {"STATE": mode}, stats)
    out = step({"observation.state": torch.full((1, 2), 0.5)})["observation.state"]
    assert out.abs().max() <= 1


def test_pictures_travel_as_bytes_and_arrive_in_0_to_1():
    out = ToDevice("cpu")(batch())
    pixels = out["observation.images.top"]
    assert pixels.dtype == torch.float32
    torch.testing.assert_close(pixels, batch()["observation.images.top"] / 255)
    assert out["action_is_pad"].dtype == torch.bool
    assert out["task"] == ["a", "b"]


def test_pictures_that_are_floats_are_not_scaled_again():
    picture = torch.rand(1, 3, 4, 5)
    out = ToDevice("cpu")({"observation.images.top": picture})
    assert torch.equal(out["observation.images.top"], picture)


class SeesImages(ProcessingStep):
    """Like a step of a user's own: it has to see floats."""

    def __call__(self, batch, context=ACTING):
        assert batch["observation.images.top"].dtype == torch.float32
        return batch


@pytest.mark.parametrize("mode", MODES)
def test_bytes_are_normalised_like_floats(mode):
    """Also of a camera that the policy does not know, and with a step in between."""
    pictures = {
        name: batch()["observation.images.top"] for name in FEATURES | {"observation.images.other": 0}
    }
    pictures.pop("observation.state")
    before, _ = pipelines(mode)
    *first, move, normalise = before.steps
    together = before(pictures)
    apart = normalise(move(pictures))
    between = Pipeline(PREPROCESSOR, [*first, move, SeesImages(), normalise])(pictures)
    for name in pictures:
        assert together[name].dtype == torch.float32
        assert torch.equal(together[name], apart[name]) and torch.equal(together[name], between[name])


def test_picture_statistics_apply_per_channel():
    before, _ = pipelines()
    out = before(batch())["observation.images.top"]
    torch.testing.assert_close(out, (batch()["observation.images.top"] / 255 - 0.125) / 0.5)


def test_pictures_are_normalised_alike_before_and_after_they_move():
    """pi0.5 normalises on the host, where pictures are still bytes."""
    rename, to_batch, to_device, normalize = pipelines()[0].steps
    early = Pipeline("early", [rename, to_batch, normalize, to_device])(batch())["observation.images.top"]
    torch.testing.assert_close(early, pipelines()[0](batch())["observation.images.top"])


def test_a_single_observation_becomes_a_batch_of_one():
    single = {key: value[0] for key, value in batch().items() if key.startswith("observation")}
    out = ToBatch()({**single, "task": "a"})
    assert out["observation.state"].shape == (1, 2)
    assert out["observation.images.top"].shape == (1, 3, 4, 5)
    assert out["task"] == ["a"]
    assert ToBatch()(batch())["observation.state"].shape == (2, 2)


def test_renames():
    assert RenameObservations({"a": "b"})({"a": 1, "c": 2}) == {"b": 1, "c": 2}


@pytest.mark.parametrize("mode", MODES)
def test_round_trip_through_a_folder(mode, tmp_path):
    for pipeline in pipelines(mode):
        pipeline.save(tmp_path)
        loaded = Pipeline.load(tmp_path, pipeline.name)
        assert [step.name for step in loaded.steps] == [step.name for step in pipeline.steps]
        assert [step.config() for step in loaded.steps] == [step.config() for step in pipeline.steps]
        for key, value in pipeline(batch()).items():
            same = loaded(batch())[key]
            assert torch.equal(value, same) if isinstance(value, torch.Tensor) else value == same


def test_layout_is_lerobots(tmp_path):
    for pipeline in pipelines():
        pipeline.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "policy_preprocessor.json",
        "policy_preprocessor_step_3_normalizer_processor.safetensors",
        "policy_postprocessor.json",
        "policy_postprocessor_step_0_unnormalizer_processor.safetensors",
    }


def saved(folder: Path, steps: list[dict]) -> Path:
    (folder / "policy_preprocessor.json").write_text(json.dumps({"name": PREPROCESSOR, "steps": steps}))
    return folder


@pytest.mark.parametrize("entry", [{"registry_name": "my_step"}, {"class": "some.code.my_step"}])
def test_an_unknown_step_is_refused_by_name_and_with_what_can_be_done(entry, tmp_path):
    message = r"policy_preprocessor\.json names .*my_step'.*@flexor\.processing_step.*delete its entry"
    with pytest.raises(CheckpointError, match=message):
        Pipeline.load(saved(tmp_path, [entry]), PREPROCESSOR)


def test_settings_that_a_step_does_not_take_are_named(tmp_path):
    steps = [{"registry_name": "to_batch_processor", "config": {"size": 3}}]
    with pytest.raises(CheckpointError, match=r"to_batch_processor.*size"):
        Pipeline.load(saved(tmp_path, steps), PREPROCESSOR)


# A step of one's own: noise in training, actions relative to the observed state


@processing_step("test_jitter")
@dataclass
class Jitter(ProcessingStep):
    size: float = 1.0

    def __call__(self, batch, context=ACTING):
        if not context.training:
            return batch
        state = batch["observation.state"]
        return {**batch, "observation.state": state + self.size * context.noise.normal("jitter", state.shape)}


@processing_step("test_relative")
@dataclass
class Relative(ProcessingStep):
    sign: int = -1

    def __call__(self, batch, context=ACTING):
        if "action" not in batch:
            return batch
        source = context.observation if self.sign > 0 else batch
        return {**batch, "action": batch["action"] + self.sign * source["observation.state"][:, None]}


@dataclass
class OwnConfig(ACTConfig):
    def steps_before(self, stats):
        rename, *rest = super().steps_before(stats)
        return [rename, Jitter(0.5), Relative(), *rest]

    def steps_after(self, stats):
        unnormalize, *rest = super().steps_after(stats)
        return [unnormalize, Relative(+1), *rest]


def own_pipelines() -> tuple[Pipeline, Pipeline]:
    modes = dict.fromkeys(("VISUAL", "STATE", "ACTION"), "MEAN_STD")
    config = OwnConfig(input_features=FEATURES, output_features=OUTPUTS, normalization_mapping=modes)
    return config.pipelines(statistics(), "cpu")


def test_a_step_draws_keyed_noise_and_only_in_training():
    before, _ = own_pipelines()
    still = before(batch())["observation.state"]

    def jittered(step: int, rows: slice = slice(None)) -> torch.Tensor:
        some = {"observation.state": batch()["observation.state"][rows]}
        noise = Noise(0, step, torch.tensor([4, 9])[rows])
        return before(some, StepContext(training=True, noise=noise))["observation.state"]

    assert torch.equal(before(batch(), StepContext(noise=Noise(0, 0, torch.tensor([4, 9]))))[STATE], still)
    assert not torch.equal(jittered(0), still) and not torch.equal(jittered(0), jittered(1))
    assert torch.equal(jittered(0)[1:], jittered(0, slice(1, 2)))  # a sample's noise is its own


def test_what_comes_after_sees_the_observation_in_the_robots_units():
    before, after = own_pipelines()
    raw = batch()
    context = StepContext(observation=before.renamed(raw))
    assert torch.equal(context.observation["observation.state"], raw["observation.state"])
    assert context.observation["observation.images.top"].dtype == torch.uint8
    relative = before(raw)["action"]
    torch.testing.assert_close(after({"action": relative}, context)["action"], raw["action"])


def test_a_step_of_ones_own_is_saved_and_loaded_by_its_name(tmp_path):
    before, _ = own_pipelines()
    before.save(tmp_path)
    again = Pipeline.load(tmp_path, PREPROCESSOR)
    assert [type(step) for step in again.steps] == [type(step) for step in before.steps]
    assert again.steps[1].size == 0.5


def test_a_rehearsal_has_the_shapes_without_the_files():
    step = Tokenize("no/such-tokenizer", max_length=20)
    out = Pipeline("plan", [step], rehearsal=True)({"task": ["a", "b"]})
    assert out[TASK_TOKENS].shape == out[TASK_MASK].shape == (2, 20)


def test_a_folder_without_processing_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"policy_preprocessor\.json"):
        Pipeline.load(tmp_path, PREPROCESSOR)


@pytest.mark.parametrize(("mode", "lost"), [("MEAN_STD", "std"), ("QUANTILES", "q99"), ("MIN_MAX", "min")])
@pytest.mark.parametrize("step", [Normalize, Unnormalize])
def test_missing_statistics_are_refused_by_name(step, mode, lost):
    with pytest.raises(ConfigError, match=f"action.*{mode}.*lack {lost}.*normalization_mapping.ACTION"):
        step(OUTPUTS, {"ACTION": mode}, statistics(without=lost))


def test_statistics_of_a_mode_that_is_not_used_are_not_asked_for():
    Normalize(OUTPUTS, {"ACTION": "MEAN_STD"}, statistics(without="q01"))


@pytest.mark.gpu
def test_an_action_has_arrived_when_it_is_read():
    """Copied without waiting, it is read before the GPU has written it."""
    action = torch.zeros(1 << 20, device="cuda")
    torch.cuda._sleep(200_000_000)
    action += 1
    assert (ToDevice("cpu")({ACTION: action})[ACTION].numpy() == 1).all()
