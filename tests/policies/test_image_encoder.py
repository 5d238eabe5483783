"""Features of images instead of images: the same loss and gradients, and what a frozen encoder depends on."""

from dataclasses import replace

import pytest
import torch

from flexor.core.batch import ACTION, IMAGE_FEATURES, STATE
from flexor.core.rng import Noise, seed_everything
from flexor.policies import policy_class
from flexor.policies.adapters import ALL_LINEAR, LoraConfig, add_adapters
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.image_encoder import digest_of, image_steps
from flexor.policies.processing.tokenize import TASK_MASK, TASK_TOKENS
from flexor.train.image_features import why_not_encoded
from parity.smolvla.vlms import make_vlms
from support import small_pi, small_xvla

TOP, WRIST = "observation.images.top", "observation.images.wrist"
SMOLVLA = {
    "chunk_size": 6,
    "n_action_steps": 4,
    "num_vlm_layers": 2,
    "resize_imgs_with_padding": (32, 32),
    "expert_width_multiplier": 0.5,
    "tokenizer_max_length": 20,
}
EXPERT_ONLY = {"train_expert_only": True}
VISION_FROZEN = {"train_expert_only": False, "freeze_vision_encoder": True}
ALL_TRAINED = {"train_expert_only": False, "freeze_vision_encoder": False}
KINDS = ["pi0", "pi05", "smolvla"]
FROZEN = {"freeze_vision_encoder": True}  # of a policy whose projection of features is always trained
CASES = {f"{kind}, expert only": (kind, EXPERT_ONLY) for kind in KINDS}
CASES |= {f"{kind}, vision frozen": (kind, VISION_FROZEN) for kind in KINDS}
CASES["xvla"] = ("xvla", FROZEN)


@pytest.fixture(scope="module")
def vlm(tmp_path_factory):
    make_vlms(folder := tmp_path_factory.mktemp("vlms"))
    return str(folder / "tiny-vlm")


def make_policy(kind, vlm, cameras=(TOP,), **settings):
    image, state, action = (3, 40, 56), (4,), (3,)
    inputs = {camera: PolicyFeature(Kind.VISUAL, image) for camera in cameras}
    inputs[STATE] = PolicyFeature(Kind.STATE, state)
    small = {**SMOLVLA, "vlm_model_name": vlm} if kind == "smolvla" else small_pi.CONFIG
    if kind in ("pi0_fast", "xvla"):
        small = small_pi.FAST_CONFIG if kind == "pi0_fast" else small_xvla.TINY
    outputs = {ACTION: PolicyFeature(Kind.ACTION, action)}
    cls = policy_class(kind)
    config = cls.Config(input_features=inputs, output_features=outputs, **{**small, **settings})
    seed_everything("weights", 0)
    return cls(config)


def batch_of(policy, size=3):
    config, generator = policy.config, torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.rand(size, *shape, generator=generator)

    return {
        **{camera: draw(*feature.shape) for camera, feature in config.images.items()},
        STATE: draw(*config.state.shape),
        ACTION: draw(config.chunk_size, *config.action.shape),
        TASK_TOKENS: torch.randint(20, (size, 20), generator=generator),
        TASK_MASK: torch.arange(20)[None] < torch.tensor([[7], [20], [3]])[:size],
    }


def with_features(policy, batch):
    """The batch with features of its images instead of them."""
    encoded = {}
    for name, value in batch.items():
        if name in policy.config.images:
            with torch.no_grad():
                encoded[f"{IMAGE_FEATURES}{name}"] = policy.encode_images(value, name)
        else:
            encoded[name] = value
    return encoded


def loss_and_gradients(policy, batch, dtype=None):
    policy.zero_grad()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = policy.loss(batch, Noise(0, 3, torch.arange(3))).per_sample
    loss.sum().backward()
    gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    assert gradients
    return loss.detach(), gradients


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_bitwise_those_of_images(case, vlm):
    """With one camera, its images are encoded as one batch either way."""
    kind, settings = CASES[case]
    policy = make_policy(kind, vlm, **settings)
    batch = batch_of(policy)
    assert policy.image_encoder().is_frozen
    for dtype in (None, torch.bfloat16):
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            features = with_features(policy, batch)
        loss, gradients = loss_and_gradients(policy, batch, dtype)
        same_loss, same_gradients = loss_and_gradients(policy, features, dtype)
        assert torch.equal(loss, same_loss)
        assert gradients.keys() == same_gradients.keys()
        assert all(torch.equal(gradients[name], same_gradients[name]) for name in gradients)


@pytest.mark.parametrize("kind", [*KINDS, "xvla"])
def test_two_cameras_one_of_which_a_sample_lacks(kind, vlm):
    policy = make_policy(kind, vlm, (TOP, WRIST), **(FROZEN if kind == "xvla" else EXPERT_ONLY))
    batch = {**batch_of(policy), f"{WRIST}_padding_mask": torch.tensor([True, False, True])}
    loss, gradients = loss_and_gradients(policy, batch)
    features = with_features(policy, batch)
    same_loss, same_gradients = loss_and_gradients(policy, features)
    torch.testing.assert_close(loss, same_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients, same_gradients, rtol=1e-3, atol=1e-5)
    # it is not seen
    name = f"{IMAGE_FEATURES}{WRIST}"
    factors = torch.tensor([1, 7, 1]).view(3, *[1] * (features[name].ndim - 1))
    features[name] = features[name] * factors
    torch.testing.assert_close(policy.loss(features, Noise(0, 3, torch.arange(3))).per_sample, same_loss)


@pytest.mark.parametrize("kind", KINDS)
def test_the_encoder_is_not_called_for_features(kind, vlm):
    policy = make_policy(kind, vlm, **EXPERT_ONLY)
    features = with_features(policy, batch_of(policy))
    for module in policy.image_encoder().modules:
        for part in module.modules():
            part.forward = None
    loss_and_gradients(policy, features)


@pytest.mark.parametrize("kind", [*KINDS, "pi0_fast", "xvla"])
def test_a_trained_encoder_is_not_frozen(kind, vlm):
    settings = ALL_TRAINED if kind in KINDS else {}
    assert not make_policy(kind, vlm, **settings).image_encoder().is_frozen


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_an_encoder_that_drops_something_in_training_says_so(rate, vlm):
    florence = small_xvla.FLORENCE
    vision = {**florence["vision_config"], "drop_path_rate": rate}
    policy = make_policy("xvla", vlm, **FROZEN, florence_config={**florence, "vision_config": vision})
    assert policy.image_encoder().is_random == (rate > 0)
    reason = why_not_encoded(policy, policy.config.pipelines({}, "cpu")[0], augmented=False)
    assert reason == ("the image encoder crops or drops something by chance in training" if rate else None)


@pytest.mark.parametrize("mode", [ALL_TRAINED, EXPERT_ONLY])
def test_an_encoder_with_adapters_is_trained(mode, vlm):
    """Frozen layers get none."""
    policy = make_policy("pi0", vlm, **mode)
    add_adapters(policy, LoraConfig(r=2), 0, ALL_LINEAR)
    assert policy.image_encoder().is_frozen == (mode == EXPERT_ONLY)


def test_features_have_the_type_of_what_takes_them(vlm):
    """A linear layer takes them, so under autocast nothing is lost if they are bfloat16."""
    for kind in KINDS:
        policy = make_policy(kind, vlm, **EXPERT_ONLY)
        with torch.autocast("cpu", torch.bfloat16):
            (features,) = (v for k, v in with_features(policy, batch_of(policy)).items() if "/" in k)
        assert features.dtype == torch.bfloat16


def pipeline_of(policy, **normalization):
    config = replace(policy.config)
    config.normalization_mapping = {**config.normalization_mapping, **normalization}
    stats = {key: {"mean": 0.4, "std": 0.2} for key in [*config.images, STATE, ACTION]}
    return image_steps(config.pipelines(stats, "cpu")[0])


def digest(policy, **normalization):
    return digest_of(policy.image_encoder(), pipeline_of(policy, **normalization))


def test_a_digest_changes_with_all_that_changes_features(vlm):
    policy = make_policy("smolvla", vlm)
    first = digest(policy)
    assert digest(make_policy("smolvla", vlm)) == first
    digests = {first, digest(policy, VISUAL="MEAN_STD"), digest(policy.bfloat16())}
    digests.add(digest(make_policy("smolvla", vlm, resize_imgs_with_padding=(64, 64))))
    policy = make_policy("smolvla", vlm)
    with torch.no_grad():
        next(policy.image_encoder().modules[0].parameters()).view(-1)[3] += 1
    digests.add(digest(policy))
    digests.add(digest(make_policy("smolvla", vlm, train_expert_only=False)))  # before the connector
    assert len(digests) == 6


def test_what_does_not_change_features_does_not_change_the_digest(vlm):
    policy = make_policy("smolvla", vlm)
    first = digest(policy)
    with torch.no_grad():
        policy.model.action_in_proj.weight.zero_()
    assert digest(policy) == first
    other = make_policy("smolvla", vlm, chunk_size=8)
    assert digest(other) == first


def test_images_are_processed_as_in_training(vlm):
    policy = make_policy("smolvla", vlm)
    pixels = torch.randint(256, (2, 3, 40, 56), dtype=torch.uint8)
    (images,) = pipeline_of(policy, VISUAL="MEAN_STD")({TOP: pixels}).values()
    torch.testing.assert_close(images, (pixels / 255 - 0.4) / (0.2 + 1e-8))
