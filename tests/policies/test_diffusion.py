"""Diffusion Policy: pictures, what a sample's loss depends on, what is refused, and runs of it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from flexor.cli.main import main
from flexor.core.batch import ACTION, ENV_STATE, STATE, VALID_STEPS
from flexor.core.errors import ConfigError
from flexor.core.rng import Noise, seed_everything
from flexor.policies.diffusion.config import DiffusionConfig
from flexor.policies.diffusion.policy import Diffusion
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.nn import resnet
from flexor.policies.nn.camera import SpatialSoftmax, center_crop, random_crop, warn_single_pixel
from flexor.policies.nn.recompute import recompute
from support import ranks, runs, small_resnet

CAMERA = "observation.images.top"
CAMERAS = {CAMERA: PolicyFeature(Kind.VISUAL, (3, 70, 90))}
LOW_DIM = {STATE: PolicyFeature(Kind.STATE, (2,)), ENV_STATE: PolicyFeature(Kind.ENV, (3,))}
TINY = DiffusionConfig(
    horizon=8,
    n_action_steps=4,
    pretrained_backbone_weights=None,
    use_group_norm=True,
    spatial_softmax_num_keypoints=4,
    crop_shape=(64, 70),
    down_dims=(16, 24),
    diffusion_step_embed_dim=8,
    num_train_timesteps=10,
    input_features={STATE: LOW_DIM[STATE], **CAMERAS},
    output_features={ACTION: PolicyFeature(Kind.ACTION, (2,))},
)
BLIND = replace(TINY, input_features=LOW_DIM)
FLAGS = [
    "--policy.type=diffusion",
    small_resnet.FLAG,
    "--policy.device=cpu",
    "--policy.horizon=8",
    "--policy.n_action_steps=4",
    "--policy.down_dims=[16,32]",
    "--policy.diffusion_step_embed_dim=8",
    "--policy.pretrained_backbone_weights=null",
    "--policy.spatial_softmax_num_keypoints=4",
    "--policy.num_train_timesteps=10",
]


def policy(config: DiffusionConfig = TINY) -> Diffusion:
    seed_everything("weights", 0)
    return Diffusion(config)


def batch(config: DiffusionConfig, size: int) -> dict[str, Tensor]:
    torch.manual_seed(7)
    made = {key: torch.rand(size, 2, *f.shape) for key, f in config.input_features.items()}
    is_pad = torch.arange(config.horizon) >= torch.randint(2, config.horizon, (size, 1))
    action = torch.rand(size, config.horizon, 2) * 2 - 1
    return {**made, ACTION: action, f"{ACTION}_is_pad": is_pad}


def noise(*samples: int) -> Noise:
    return Noise(0, 0, torch.tensor(samples))


def test_a_sample_s_loss_does_not_depend_on_its_batch():
    """Crops, levels and noise are the sample's own."""
    diffusion, made = policy(), batch(TINY, 4)
    together = diffusion.loss(made, noise(*range(4))).per_sample
    part = {key: value[2:] for key, value in made.items()}
    torch.testing.assert_close(diffusion.loss(part, noise(2, 3)).per_sample, together[2:])


def test_parts_of_a_batch_weigh_by_their_valid_actions():
    config = replace(BLIND, do_mask_loss_for_padding=True)
    made, each = batch(config, 5), policy(config)
    loss_of_all = each.loss(made, noise(*range(5))).per_sample.mean()
    assert not torch.allclose(loss_of_all, policy(BLIND).loss(made, noise(*range(5))).per_sample.mean())
    valid = (~made[f"{ACTION}_is_pad"]).sum(1).float().mean()
    losses = []
    for part in (slice(0, 2), slice(2, 5)):
        some = {key: value[part] for key, value in made.items()}
        losses.append(each.loss({**some, VALID_STEPS: valid}, noise(*range(5)[part])).per_sample)
    torch.testing.assert_close(torch.cat(losses).mean(), loss_of_all)


def test_acting_is_keyed_and_starts_now():
    made = policy(BLIND).eval()
    observed = batch(BLIND, 3)
    with torch.no_grad():
        chunk = made.predict(observed, noise(4, 5, 6))
        assert chunk.shape == (3, 7, 2)  # of 8 actions, one is in the past
        alone = made.predict({key: value[1:2] for key, value in observed.items()}, noise(5))
        assert not torch.allclose(chunk[:1], made.predict({k: v[:1] for k, v in observed.items()}, noise(5)))
    torch.testing.assert_close(alone, chunk[1:2])


def test_crops_differ_between_samples_and_not_between_moments():
    x = torch.arange(9 * 11).view(1, 1, 1, 9, 11).expand(5, 2, 3, 9, 11).contiguous()
    cut = random_crop(x, (4, 6), noise(*range(5)), "crop")
    assert cut.shape == (5, 2, 3, 4, 6)
    corners = cut[:, 0, 0, 0, 0]
    assert len(corners.unique()) > 1
    for sample, corner in enumerate(corners.tolist()):
        top, left = divmod(corner, 11)
        assert torch.equal(cut[sample], x[sample, :, :, top : top + 4, left : left + 6])
    places = {
        tuple(divmod(int(c), 11))
        for c in random_crop(x.repeat(60, 1, 1, 1, 1), (8, 10), noise(*range(300)), "c")[:, 0, 0, 0, 0]
    }
    assert places == {(0, 0), (0, 1), (1, 0), (1, 1)}  # every place there is
    assert torch.equal(center_crop(x, (4, 6)), x[..., 2:6, 2:8])


def test_pictures_are_cropped_in_the_middle_when_not_training():
    made = policy().eval()
    observed = batch(TINY, 2)
    losses = [made.loss(observed, noise(0, 1)).per_sample]
    observed[CAMERA][..., :2, :] = 9.0  # outside of the middle
    losses.append(made.loss(observed, noise(0, 1)).per_sample)
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("group_norm", [True, False])
def test_computing_blocks_again_changes_nothing(group_norm):
    """Running statistics included, and however often it is asked for."""
    config = replace(TINY, use_group_norm=group_norm)
    made = [policy(config), policy(replace(config, gradient_checkpointing=True))]
    for unit in made[1].shard_units():
        recompute(unit)
    for each in made:
        each.loss(batch(config, 3), noise(0, 1, 2)).per_sample.mean().backward()
    for parameter, other in zip(*(each.parameters() for each in made)):
        assert torch.equal(parameter.grad, other.grad)
    for buffer, other in zip(*(each.buffers() for each in made)):
        assert torch.equal(buffer, other)


def test_batch_norm_is_torch_s():
    config = replace(TINY, use_group_norm=False)
    made = policy(config)
    norm = made.diffusion.rgb_encoder[0].backbone[1]
    reference = nn.BatchNorm2d(64)
    x = torch.randn(3, 64, 5, 4)
    for _ in range(3):
        torch.testing.assert_close(norm(x), reference(x))
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(norm.state_dict()[name], value)
    torch.testing.assert_close(norm.eval()(x), reference.eval()(x))
    assert norm.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


def test_starts_from_imagenet_weights(tmp_path, monkeypatch):
    state = {k: torch.rand_like(v) for k, v in resnet.ResNet("resnet18").state_dict().items()}
    (tmp_path / "hub/checkpoints").mkdir(parents=True)
    torch.save(state, tmp_path / "hub/checkpoints/resnet18-f37072fd.pth")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    weights = "ResNet18_Weights.IMAGENET1K_V1"
    two = {**TINY.input_features, "observation.images.wrist": CAMERAS[CAMERA]}
    config = replace(TINY, use_group_norm=False, pretrained_backbone_weights=weights, input_features=two)
    made = policy(config)
    made.load_backbone()
    for encoder in made.diffusion.rgb_encoder:
        assert torch.equal(encoder.backbone[0].weight, state["conv1.weight"])
        assert torch.equal(encoder.backbone[7][1].bn2.running_var, state["layer4.1.bn2.running_var"])


def test_bfloat16_keeps_positions_exact():
    pool = SpatialSoftmax(6, 30, 40, 2)
    features = torch.randn(2, 6, 30, 40)
    with torch.autocast("cpu", torch.bfloat16):
        pooled = pool(features)
    assert pooled.dtype == torch.float32
    torch.testing.assert_close(pooled, pool(features), rtol=0, atol=1e-3)


def test_sharding_covers_nearly_all_weights():
    made = policy(replace(TINY, down_dims=(64, 128)))
    units = {id(p) for unit in made.shard_units() for p in unit.parameters()}
    assert sum(p.numel() for p in made.parameters() if id(p) not in units) < 0.02 * sum(
        p.numel() for p in made.parameters()
    )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"horizon": 6}, "multiple of 4"),
        ({"horizon": 0}, "at least 1"),
        ({"n_action_steps": 8}, "horizon - policy.n_obs_steps"),
        ({"down_dims": ()}, "at least one"),
        ({"down_dims": (12, 16)}, "n_groups=8"),
        ({"down_dims": (12, 16), "n_groups": 4}, "multiple of 8"),
        ({"kernel_size": 4}, "odd"),
        ({"diffusion_step_embed_dim": 2}, "at least 4"),
        ({"num_inference_steps": 11}, "num_inference_steps=11"),
        ({"crop_ratio": 0.0}, "crop_ratio=0.0"),
        ({"crop_shape": (71, 70)}, "does not fit into observation.images.top"),
        ({"crop_shape": (0, 70)}, "at least 1 by 1"),
        ({"resize_shape": (0, 70), "crop_shape": None}, "resize_shape"),
        ({"resize_shape": (80, 80)}, "crop_ratio instead"),
        (
            {"pretrained_backbone_weights": "ResNet18_Weights.IMAGENET1K_V1"},
            "pretrained_backbone_weights=null",
        ),
        ({"input_features": CAMERAS}, "requires observation.state"),
        ({"input_features": {STATE: LOW_DIM[STATE]}}, "requires a camera"),
        (
            {
                "input_features": {
                    **LOW_DIM,
                    **CAMERAS,
                    "observation.images.b": PolicyFeature(Kind.VISUAL, (3, 99, 99)),
                }
            },
            "one size",
        ),
    ],
)
def test_what_can_t_be_is_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        replace(TINY, **settings).validate()


def test_says_that_pictures_are_too_small(log_lines):
    warn_single_pixel.cache_clear()
    small = {STATE: LOW_DIM[STATE], CAMERA: PolicyFeature(Kind.VISUAL, (3, 32, 32))}
    policy(replace(TINY, input_features=small, crop_shape=None, resize_shape=(33, 32)))
    assert not log_lines
    policy(replace(TINY, input_features=small, crop_shape=None))
    assert "resize_shape" in log_lines[0]


def test_a_grey_camera_is_refused():
    grey = {STATE: LOW_DIM[STATE], CAMERA: PolicyFeature(Kind.VISUAL, (1, 70, 90))}
    with pytest.raises(ConfigError, match="1 channels"):
        policy(replace(TINY, input_features=grey))


def test_resumed_run_is_bitwise_the_uninterrupted_one(dataset, tmp_path):
    """Running statistics of batch norm included."""
    more = ("--steps=3", "--save_freq=2", "--batch_size=2")
    pictures = ("--policy.resize_shape=[64,64]", "--policy.crop_ratio=0.9")
    uninterrupted = runs.train(dataset, tmp_path / "whole", FLAGS, *more, *pictures)
    cut = runs.cut_back(uninterrupted, tmp_path / "cut", 2)
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(uninterrupted, cut, 3)


@pytest.mark.slow
@pytest.mark.ranks
def test_batch_norm_sees_the_batch_of_all_processes(dataset, tmp_path):
    common = ["--steps=2", "--save_freq=0", "--optimizer.eps=1e-4", "--policy.resize_shape=[64,64]"]
    for name, processes, size in (("alone", 1, 4), ("many", 2, 2)):
        run = tmp_path / name / "run"
        flags = runs.flags(dataset, run, FLAGS, *common, f"--batch_size={size}")
        ranks.run(tmp_path / name, processes, ["train", *flags])
    alone, many = tmp_path / "alone/run", tmp_path / "many/run"
    assert ranks.losses(many) == pytest.approx(ranks.losses(alone), rel=1e-5)
    assert ranks.apart(ranks.weights(many, 2), ranks.weights(alone, 2)) < 5e-5
