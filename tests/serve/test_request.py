"""Messages of clients: names, images in every form, histories, options; what does not fit says why."""

import numpy as np
import pytest

from flexor.core.errors import ConfigError
from flexor.policies.diffusion.config import DiffusionConfig
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.processing.rename_and_move import with_renaming
from flexor.serve.request import BadRequest, ObservationForm, ObservationReader
from flexor_client.wire import Limits, encode_jpeg
from support.serving import CAMERA, SIZE, STATE, Talk, expected, numbers, observation, serving

CONFIG = numbers().policy.config
PIXELS = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), np.uint8)


def reader(config=CONFIG, names=()) -> ObservationReader:
    return ObservationReader(ObservationForm.of_policy(config, dict(names)), Limits())


@pytest.mark.parametrize("image", [PIXELS, PIXELS.transpose(2, 0, 1)])
def test_images_may_have_their_channels_first_or_last(image):
    asked = reader().read(observation() | {CAMERA: image})
    np.testing.assert_array_equal(asked.observation[CAMERA], PIXELS.transpose(2, 0, 1))
    assert not asked.stacked and asked.options is None and asked.task == ""


def test_a_jpeg_file_is_decoded():
    flat = np.full((SIZE, SIZE, 3), (200, 30, 90), np.uint8)
    message = observation() | {CAMERA: encode_jpeg(flat)}
    assert reader().files(message) == [message[CAMERA]] and reader().files(observation()) == []
    found = reader().read(message).observation[CAMERA]
    assert np.abs(found.astype(int) - flat.transpose(2, 0, 1)).max() < 8
    decoded = {id(message[CAMERA]): reader().decode(message[CAMERA])}
    np.testing.assert_array_equal(reader().read(message, decoded).observation[CAMERA], found)
    assert (
        reader().decode(b"GIF") is None
        and reader().decode(encode_jpeg(np.zeros((16, 8, 3), np.uint8))) is None
    )


def test_names_are_keys_or_paths():
    mapped = reader(names={CAMERA: "images/cam_high", STATE: "observation/joints"})
    flat = {"images/cam_high": PIXELS, "observation/joints": [1, 2, 3], "task": "go"}
    nested = {
        "images": {"cam_high": PIXELS},
        "observation": {"joints": np.array([1, 2, 3.0])},
        "prompt": "go",
    }
    one, other = mapped.read(flat), mapped.read(nested)
    for name in (CAMERA, STATE):
        np.testing.assert_array_equal(one.observation[name], other.observation[name])
    assert one.task == other.task == "go" and one.observation[STATE].dtype == np.float32


def test_a_policy_that_renames_is_asked_under_the_robots_names():
    """As it was trained: --rename_map={observation.images.front: observation.images.top}."""
    policy = numbers()
    policy.preprocessor = with_renaming(policy.preprocessor, {"observation.images.front": CAMERA})
    image = observation()[CAMERA]
    with serving(policy) as (url, _), Talk(url) as robot:
        assert [*robot.metadata["inputs"]] == [STATE, "observation.images.front"]
        for name in ("observation.images.front", CAMERA):
            asked = {STATE: np.array([3, -3, 0], np.float32), name: image}
            np.testing.assert_array_equal(robot.ask(asked)["actions"], expected(3))
        assert "needs observation.images.front" in robot.ask({STATE: [1, 2, 3]})
    with serving(policy, {CAMERA: "eye"}) as (url, _), Talk(url) as robot:
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
        (observation() | {STATE: [[1], [2, 3]]}, "must be numbers, not a list"),
        (observation() | {STATE: ["a", "b", "c"]}, "must be numbers"),
        (observation() | {STATE: [1, np.nan, 3]}, "not finite"),
        (observation() | {STATE: np.array([1, 1e300, 3])}, "not finite"),
        (observation() | {STATE: [10**400, 1, 1]}, "must be numbers"),
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
        (observation(flexor={"delay": 1.5}), "`flexor.delay` must be"),
        (observation(flexor={"deadline_ms": float("nan")}), "`flexor.deadline_ms` must be milliseconds"),
        (observation(flexor={"age_ms": None}), "`flexor.age_ms` must be milliseconds"),
        (observation(flexor={"previous": np.zeros((2, 3))}), r"a float array \[at least 1, 2\]"),
        (observation(flexor={"previous": np.zeros((0, 2))}), r"a float array \[at least 1, 2\]"),
        (observation(flexor={"previous": np.full((2, 2), np.inf)}), "`flexor.previous` must be finite"),
        (observation(flexor={"id": [1]}), "`flexor.id` must be a number"),
    ],
)
def test_what_does_not_fit_is_refused(message, words):
    with pytest.raises(BadRequest, match=words):
        reader().read(message)


def test_a_history_may_be_sent():
    config = DiffusionConfig(
        input_features={
            CAMERA: PolicyFeature(Kind.VISUAL, (3, SIZE, SIZE)),
            STATE: PolicyFeature(Kind.STATE, (3,)),
        },
        output_features={"action": PolicyFeature(Kind.ACTION, (2,))},
    )
    read = reader(config).read
    two = read({CAMERA: np.stack([PIXELS, PIXELS]), STATE: np.ones((2, 3))})
    assert two.stacked and two.observation[CAMERA].shape == (2, 3, SIZE, SIZE)
    files = read({CAMERA: [encode_jpeg(PIXELS)] * 2, STATE: [[1, 2, 3], [4, 5, 6]]})
    assert files.stacked and files.observation[CAMERA].shape == (2, 3, SIZE, SIZE)
    assert not read(observation()).stacked
    with pytest.raises(BadRequest, match=r"every input must have 2 entries, those of the steps \[-1, 0\]"):
        read({CAMERA: np.stack([PIXELS, PIXELS]), STATE: np.ones(3)})
    with pytest.raises(BadRequest, match="must have 2 entries"):
        read({CAMERA: np.stack([PIXELS] * 3), STATE: np.ones((3, 3))})


def test_only_inputs_of_the_policy_can_be_mapped():
    with pytest.raises(ConfigError, match=r"--map observation.images.tap=.*observation.images.top"):
        reader(names={"observation.images.tap": "x"})
