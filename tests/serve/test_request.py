"""Messages of clients: names, images in every form, histories, options; what does not fit says why."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flexor.core.errors import ConfigError
from flexor.policies.diffusion.config import DiffusionConfig
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.processing.rename_and_move import with_renaming
from flexor.policies.smolvla.config import SmolVLAConfig
from flexor.serve.form import ObservationForm
from flexor.serve.limits import BadRequest, Budget, RequestLimits
from flexor.serve.request import ObservationReader, PolicyRequest
from flexor_client.jpeg import encode_jpeg
from support.frames_to_fuzz import hostile_frame
from support.handle_requests import handle, reader_for
from support.serving import (
    CAMERA,
    SIZE,
    STATE,
    RawClient,
    expected,
    needs_linux,
    numbers,
    observation,
    serving,
)

CONFIG = numbers().policy.config
PIXELS = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), np.uint8)


def reader(config=CONFIG, names=()) -> ObservationReader:
    form = ObservationForm.of_policy(config, dict(names))
    return ObservationReader(form, RequestLimits.of(form))


def read(message, config=CONFIG, names=()) -> PolicyRequest:
    checked = reader(config, names).check(message)
    return checked.request({file: file.decode() for file in checked.files()})


@pytest.mark.parametrize("image", [PIXELS, PIXELS.transpose(2, 0, 1)])
def test_images_may_have_their_channels_first_or_last(image):
    request = read(observation() | {CAMERA: image})
    np.testing.assert_array_equal(request.observation[CAMERA], PIXELS.transpose(2, 0, 1))
    assert not request.stacked and request.options is None and request.task == ""


def test_a_jpeg_file_is_decoded():
    flat = np.full((SIZE, SIZE, 3), (200, 30, 90), np.uint8)
    message = observation() | {CAMERA: encode_jpeg(flat)}
    assert len(reader().check(message).files()) == 1 and reader().check(observation()).files() == []
    image = read(message).observation[CAMERA]
    assert np.abs(image.astype(int) - flat.transpose(2, 0, 1)).max() < 8


def test_names_are_keys_or_paths():
    names = {CAMERA: "images/cam_high", STATE: "observation/joints"}
    flat = {"images/cam_high": PIXELS, "observation/joints": [1, 2, 3], "task": "go"}
    nested = {
        "images": {"cam_high": PIXELS},
        "observation": {"joints": np.array([1, 2, 3.0])},
        "prompt": "go",
    }
    from_flat, from_nested = read(flat, names=names), read(nested, names=names)
    for name in (CAMERA, STATE):
        np.testing.assert_array_equal(from_flat.observation[name], from_nested.observation[name])
    assert from_flat.task == from_nested.task == "go" and from_flat.observation[STATE].dtype == np.float32


def test_a_policy_that_renames_is_asked_under_the_robots_names():
    """As it was trained: --rename_map={observation.images.front: observation.images.top}."""
    policy = numbers()
    policy.preprocessor = with_renaming(policy.preprocessor, {"observation.images.front": CAMERA})
    image = observation()[CAMERA]
    with serving(policy) as (url, _), RawClient(url) as robot:
        assert [*robot.metadata["inputs"]] == [STATE, "observation.images.front"]
        for name in ("observation.images.front", CAMERA):
            message = {STATE: np.array([3, -3, 0], np.float32), name: image}
            np.testing.assert_array_equal(robot.ask(message)["actions"], expected(3))
        assert "needs observation.images.front" in robot.ask({STATE: [1, 2, 3]})
    with serving(policy, {CAMERA: "eye"}) as (url, _), RawClient(url) as robot:
        np.testing.assert_array_equal(robot.ask({STATE: [3, -3, 0], "eye": image})["actions"], expected(3))
        assert "needs eye" in robot.ask(observation(3))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ([1], "must be a map of names to values, not a list"),
        ({}, f"needs {STATE}, but the observation has only nothing"),
        (
            {STATE: [1, 2, 3], "top": PIXELS},
            f"needs {CAMERA}, but the observation has only {STATE}, top. .* --map {CAMERA}=NAME",
        ),
        (observation() | {CAMERA: PIXELS[:4]}, r"is \[4, 8, 3\], .* images \[8, 8, 3\]: resize it"),
        (
            observation() | {CAMERA: PIXELS / 255},
            "uint8 array or a JPEG file in bytes, not an array of float64",
        ),
        (
            observation() | {CAMERA: encode_jpeg(np.zeros((32, 16, 3), np.uint8))},
            r"is \[32, 16, 3\], .* images \[8, 8, 3\]: resize it",
        ),
        (observation() | {CAMERA: b"GIF89a"}, f"{CAMERA}: The bytes are not a JPEG"),
        (observation() | {CAMERA: "text"}, "not text"),
        (observation() | {CAMERA: [PIXELS] * 1000}, "a list of 1000 values, but the policy sees 1"),
        (observation() | {CAMERA: PIXELS[None]}, "sees one observation, without a history"),
        (observation() | {STATE: [1, 2]}, r"is \[2\], but the policy was trained on \[3\]"),
        (observation() | {STATE: [[1], [2, 3]]}, r"is \[2, 1\], but the policy was trained on \[3\]"),
        (observation() | {STATE: ["a", "b", "c"]}, "must be numbers"),
        (observation() | {STATE: [1, 2, None]}, "must be numbers"),
        (observation() | {STATE: [1, 2, [3]]}, "must be numbers"),
        (observation() | {STATE: [1, 2, np.ones(1)]}, "must be numbers"),
        (observation() | {STATE: np.array(["a", "b", "c"])}, "must be numbers"),
        (observation() | {STATE: "123"}, "must be numbers, not text"),
        (observation() | {STATE: np.ones((7, 3))}, "sees one observation, without a history"),
        (observation() | {STATE: [1, np.nan, 3]}, "not finite"),
        (observation() | {STATE: np.array([1, 1e300, 3])}, "not finite"),
        (observation() | {STATE: [10**400, 1, 1]}, "too large"),
        (observation(prompt=3), "`prompt` must be text"),
        (observation(prompt="x" * 5000), "at most 4096 characters"),
        (observation(flexor=[1]), "must be a map of options"),
        (observation(flexor={"ressession": 1}), "unknown option 'ressession'"),
        (observation(flexor={b"id": 1}), "unknown option b'id'"),
        (observation(flexor={"session": "x" * 65}), "`flexor.session` must be at most 64"),
        (observation(flexor={"reset": 1}), "`flexor.reset` must be true or false"),
        (observation(flexor={"episode": -1}), "`flexor.episode` must be a whole number"),
        (observation(flexor={"step": 2**60}), "`flexor.step` must be"),
        (observation(flexor={"reply": "both"}), "`flexor.reply` must be chunk or action"),
        (observation(flexor={"reply": np.ones(2)}), "`flexor.reply` must be chunk or action"),
        (observation(flexor={"delay": 1.5}), "`flexor.delay` must be"),
        (observation(flexor={"deadline_ms": float("nan")}), "`flexor.deadline_ms` must be milliseconds"),
        (observation(flexor={"age_ms": None}), "`flexor.age_ms` must be milliseconds"),
        (observation(flexor={"previous": np.zeros((2, 3))}), r"a float array \[at least 1, 2\]"),
        (observation(flexor={"previous": np.zeros((0, 2))}), r"a float array \[at least 1, 2\]"),
        (observation(flexor={"previous": np.full((2, 2), np.inf)}), "`flexor.previous` must be finite"),
        (observation(flexor={"previous": np.full((2, 2), 1e300)}), "`flexor.previous` must be finite"),
        (observation(flexor={"id": [1]}), "`flexor.id` must be a number"),
    ],
)
def test_what_does_not_fit_is_refused(message, words):
    with pytest.raises(BadRequest, match=words):
        read(message)


def test_a_history_may_be_sent():
    config = DiffusionConfig(
        input_features={
            CAMERA: PolicyFeature(Kind.VISUAL, (3, SIZE, SIZE)),
            STATE: PolicyFeature(Kind.STATE, (3,)),
        },
        output_features={"action": PolicyFeature(Kind.ACTION, (2,))},
    )

    def read(message):
        checked = reader(config).check(message)
        return checked.request({file: file.decode() for file in checked.files()})

    two = read({CAMERA: np.stack([PIXELS, PIXELS]), STATE: np.ones((2, 3))})
    assert two.stacked and two.observation[CAMERA].shape == (2, 3, SIZE, SIZE)
    files = read({CAMERA: [encode_jpeg(PIXELS)] * 2, STATE: [[1, 2, 3], [4, 5, 6]]})
    assert files.stacked and files.observation[CAMERA].shape == (2, 3, SIZE, SIZE)
    assert not read(observation()).stacked
    with pytest.raises(BadRequest, match=r"every input must have 2 entries, those of the steps \[-1, 0\]"):
        read({CAMERA: np.stack([PIXELS, PIXELS]), STATE: np.ones(3)})
    with pytest.raises(BadRequest, match="must have 2 entries"):
        read({CAMERA: np.stack([PIXELS] * 3), STATE: np.ones((3, 3))})


def test_some_policies_act_without_a_camera_but_not_without_all():
    side = "observation.images.side"
    cameras = {CAMERA: CONFIG.images[CAMERA], side: PolicyFeature(Kind.VISUAL, (3, 4, 5))}
    state = {STATE: PolicyFeature(Kind.STATE, (3,))}
    config = SmolVLAConfig(
        input_features={**state, **cameras}, output_features={"action": PolicyFeature(Kind.ACTION, (2,))}
    )
    assert read(observation(), config).observation.keys() == {CAMERA, STATE}
    for missing in (CAMERA, STATE):
        message = {name: value for name, value in observation().items() if name != missing}
        with pytest.raises(BadRequest, match=f"The policy needs {missing}"):
            read(message, config)


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=needs_linux)])
def test_robots_with_different_cameras_are_served_together(processes, log_lines):
    pretrained = numbers()
    config = pretrained.policy.config
    config.input_features["observation.images.side"] = PolicyFeature(Kind.VISUAL, (3, 4, 5))
    config.can_act_without = lambda names: {*names} <= {"observation.images.side"}
    side = {"observation.images.side": np.zeros((4, 5, 3), np.uint8)}
    with (
        serving(pretrained, processes=processes) as (url, _),
        RawClient(url) as first,
        RawClient(url) as second,
    ):
        for value in (1.0, 2.0):
            for robot, more in ((first, side), (second, {}), (second, side), (first, {})):
                reply = robot.ask(observation(value, **more))
                np.testing.assert_array_equal(reply["actions"], expected(value))


def test_only_inputs_of_the_policy_can_be_mapped():
    with pytest.raises(ConfigError, match=r"--map observation.images.tap=.*observation.images.top"):
        reader(names={"observation.images.tap": "x"})


def test_no_request_takes_more_memory_than_the_policy_needs():
    """Each small request of these became up to 2 GB, or took up to a minute. They are handled in another process."""
    done = subprocess.run(
        [sys.executable, "-m", "support.handle_requests"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    results = json.loads(done.stdout)
    read = {name for name, result in results["answers"].items() if result == "read"}
    assert read == {"raw", "jpeg", "a long chunk"}  # of which only what can be used is taken
    assert results["peak_mb"] < 64


def test_what_a_request_makes_is_limited_as_a_whole():
    form = ObservationForm.of_policy(CONFIG, {})
    limits = RequestLimits.of(form)
    assert form.bytes <= limits.decoded <= 3 * form.bytes and limits.frame.frame_bytes >= 2 * form.bytes
    budget = Budget(limits)
    budget.take("eye", limits.decoded)
    with pytest.raises(BadRequest, match="eye: the request would take more memory"):
        budget.take("eye", 1)
    small = dataclasses.replace(limits, decoded=form.bytes // 2)
    with pytest.raises(BadRequest, match="more memory"):
        ObservationReader(form, small).check(observation() | {CAMERA: encode_jpeg(PIXELS)})


def test_a_chunk_that_is_executed_is_cut_to_what_a_new_one_covers():
    previous = np.arange(2000, dtype=np.float64).reshape(1000, 2)
    taken = read(observation(flexor={"previous": previous})).options.previous
    np.testing.assert_array_equal(taken, previous[: len(CONFIG.action_deltas)])
    assert taken.dtype == np.float32


def test_fuzzing_raises_nothing_but_refusals():
    """A short version of benchmarks/fuzz_wire.py."""
    rng = np.random.default_rng(0)
    results = {
        handle(reader_for(8, 8, steps), hostile_frame(rng)) == "read"
        for _ in range(500)
        for steps in (None, [-1, 0])
    }
    assert results == {True, False}
