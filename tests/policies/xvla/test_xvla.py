"""X-VLA beyond its numbers: randomness, cameras, domains, weights in old files, groups of the optimizer."""

import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from flexor.config.optimizer import resolve_optimizer
from flexor.config.schema import OptimizerConfig
from flexor.core.batch import ACTION_LENGTH, BATCH_PLACE
from flexor.core.errors import CheckpointError
from flexor.core.rng import GraphNoise, Noise, NoiseKeys
from flexor.policies import make_policy
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.nn.real_time import GUIDANCE_WEIGHTS, PREVIOUS
from flexor.policies.pretrained import load_pretrained, save_pretrained
from flexor.policies.processing.tokenize import TASK_TOKENS
from flexor.policies.weight_names import unique_state
from flexor.policies.xvla.action_spaces import ACTION_SPACES, ActionLayout, action_space
from flexor.policies.xvla.policy import XVLA
from flexor.train.optim.optimizers import build_optimizer
from support.small_xvla import features, small_config

TOP, LEFT = "observation.images.top", "observation.images.left"
TWO_CAMERAS = {"input_features": features({"top": (40, 56), "left": (40, 56)})}


def policy(**changes) -> XVLA:
    torch.manual_seed(0)
    made = make_policy(small_config(**changes))
    assert isinstance(made, XVLA)
    return made


def batch(count: int = 4, cameras: tuple[str, ...] = (TOP,)) -> dict:
    torch.manual_seed(1)
    return {
        **{camera: torch.randn(count, 3, 40, 56) for camera in cameras},
        "observation.state": torch.randn(count, 4),
        "action": torch.randn(count, 8, 3),
        TASK_TOKENS: torch.randint(100, (count, 12)),
        "domain_id": torch.arange(count) % 3,
    }


def rows(tensors: dict, selection: slice) -> dict:
    return {name: value[selection] for name, value in tensors.items()}


def noise(*samples: int, step: int = 7) -> Noise:
    return Noise(3, step, torch.tensor(samples))


@pytest.mark.parametrize("splits", [(4,), (2, 2), (1, 3)])
def test_times_depend_on_the_place_in_the_global_batch(splits):
    """However a batch is split over processes and micro-batches, its samples have the same times."""
    made, together = policy().eval(), {**batch(), BATCH_PLACE: torch.arange(4) / 4}
    whole = made.loss(together, noise(*range(4))).per_sample
    starts = np.cumsum((0, *splits))
    parts = [
        made.loss(rows(together, slice(a, b)), noise(*range(a, b))).per_sample for a, b in pairwise(starts)
    ]
    torch.testing.assert_close(torch.cat(parts), whole)
    without_places = made.loss(batch(), noise(*range(4))).per_sample
    torch.testing.assert_close(without_places, whole)


def test_times_are_spread_evenly_and_begin_anywhere():
    made, places = policy(), {"action": torch.zeros(8, 1), BATCH_PLACE: torch.arange(8) / 8}
    starts = []
    for step in range(200):
        times = made._times(places, noise(*range(8), step=step))
        assert ((times >= 0) & (times < 1)).all()
        assert ((times * 8).floor().sort().values == torch.arange(8)).all()  # one in each eighth
        starts.append(float(times[0]))
    assert np.abs(np.sort(starts) - np.linspace(0, 1, 200)).max() < 0.12  # Kolmogorov and Smirnov, at 0.5 %


def test_a_graph_draws_the_same_times():
    keys = NoiseKeys(torch.device("cpu"))
    graph_noise = GraphNoise(keys, torch.arange(4))
    made, together = policy().eval(), batch()
    made.loss(together, graph_noise)  # finds the names
    keys.write(3, 7)
    expected = made.loss(together, noise(*range(4))).per_sample
    assert torch.equal(made.loss(together, graph_noise).per_sample, expected)


def test_a_camera_that_only_some_samples_have():
    """Its tokens are zeros there: what the image shows does not matter."""
    made, both = policy(**TWO_CAMERAS).eval(), batch(2, (TOP, LEFT))
    hidden = {**both, f"{LEFT}_padding_mask": torch.tensor([True, False])}
    changed = {**hidden, LEFT: hidden[LEFT].flip(0)}
    first, second = (made.predict(each, noise(1, 2)) for each in (hidden, changed))
    assert torch.equal(first[1], second[1]) and not torch.allclose(first[0], second[0])
    alone = rows({name: value for name, value in both.items() if name != LEFT}, slice(1, 2))
    torch.testing.assert_close(made.predict(alone, noise(2)), first[1:])


def test_the_task_the_state_and_the_domain_matter():
    made, first = policy().eval(), batch()
    before = made.predict(first, noise(*range(4)))
    for name, other in (
        (TASK_TOKENS, first[TASK_TOKENS].flip(0)),
        ("observation.state", first["observation.state"].flip(0)),
        ("domain_id", (first["domain_id"] + 1) % 3),
    ):
        assert not torch.allclose(made.predict({**first, name: other}, noise(*range(4))), before), name


def test_domains_come_from_a_column_if_it_is_named():
    made, first = policy(domain_feature_key="robot").eval(), batch()
    named = {**first, "robot": torch.tensor([[2.0], [2.0], [0.0], [1.0]])}
    same = {**first, "domain_id": torch.tensor([2, 2, 0, 1])}
    before = made.predict(same, noise(*range(4)))
    assert torch.equal(made.predict(named, noise(*range(4))), before)
    assert not torch.allclose(made.predict(first, noise(*range(4))), before)


def test_a_chunk_continues_the_last_one():
    made, observed = policy().eval(), batch()
    plain = made.predict(observed, noise(*range(4)))
    weights = torch.tensor([1.0, 1, 0.5, 0, 0, 0, 0, 0])
    previous = torch.full((4, 3, 3), 0.7)
    guided = made.predict({**observed, PREVIOUS: previous, GUIDANCE_WEIGHTS: weights}, noise(*range(4)))
    assert torch.allclose(guided[:, :2], previous[:, :2])
    assert not torch.allclose(guided[:, 3:], plain[:, 3:])  # what follows takes account of it
    none = made.predict({**observed, PREVIOUS: previous, GUIDANCE_WEIGHTS: 0 * weights}, noise(*range(4)))
    assert torch.equal(none, plain)


def test_grippers_continue_as_openings():
    """The network predicts logits of grippers, and a robot has openings from 0 to 1."""
    wide = {
        "action_mode": "joint",
        "max_state_dim": 14,
        "output_features": {"action": PolicyFeature(Kind.ACTION, (14,))},
    }
    made, observed = policy(**wide).eval(), batch()
    plain = made.predict(observed, noise(*range(4)))
    assert ((plain[..., [6, 13]] > 0) & (plain[..., [6, 13]] < 1)).all()
    previous, weights = torch.full((4, 8, 14), 0.9), torch.tensor([1.0, 0.5, *[0] * 6])
    guided = made.predict({**observed, PREVIOUS: previous, GUIDANCE_WEIGHTS: weights}, noise(*range(4)))
    assert torch.allclose(guided[:, 0], previous[:, 0])
    assert ((guided[..., [6, 13]] > 0) & (guided[..., [6, 13]] < 1)).all()


@pytest.mark.parametrize("mode", [*ACTION_SPACES, "auto"])
def test_losses_of_samples_have_the_mean_of_the_batch(mode):
    space = action_space(mode, 9, 5)
    layout = ActionLayout(space, 20)
    predicted, actions = torch.randn(3, 4, space.width), torch.rand(3, 4, space.width)
    parts = layout.losses(predicted, actions)
    for name, pieces in space.parts.items():
        expected = torch.zeros(())
        for part in pieces:
            pair = predicted[..., list(part.channels)], actions[..., list(part.channels)]
            binary = torch.nn.functional.binary_cross_entropy_with_logits
            expected += part.scale * (binary if part.binary else torch.nn.functional.mse_loss)(*pair)
        torch.testing.assert_close(parts[name].mean(), expected)
    assert layout.output(predicted).shape[-1] == space.output


def test_padding_of_actions_is_not_learned_in_a_mixture():
    made = policy(output_features={"action": PolicyFeature(Kind.ACTION, (5,))}).eval()
    first = {**batch(), "action": torch.nn.functional.pad(batch()["action"], (0, 2))}
    mixed = {**first, ACTION_LENGTH: torch.tensor([3, 5, 3, 3])}
    narrow, wide = (made.loss(each, noise(*range(4))).per_sample for each in (mixed, first))
    assert torch.equal(narrow[1], wide[1]) and not torch.allclose(narrow[0], wide[0])
    predicted, space = torch.randn(1, 8, 5), ActionLayout(action_space("auto", 5, 5), 6)
    valid = made._valid_channels({ACTION_LENGTH: torch.tensor([3])}, 5)
    error = space.losses(predicted, torch.zeros(1, 8, 5), valid)["joints_loss"]
    torch.testing.assert_close(error[0], predicted[..., :3].square().mean())


def test_three_groups_of_learning_rates():
    made = policy(optimizer_soft_prompt_lr_scale=0.5, optimizer_weight_decay=0.2)
    optimizer = build_optimizer(resolve_optimizer(OptimizerConfig(lr=1e-2), made.config), made)
    groups = {group["name"]: group for group in optimizer.param_groups}
    assert {name: (group["lr"], group["weight_decay"]) for name, group in groups.items()} == {
        "vlm": pytest.approx((1e-3, 0.02)),
        "soft_prompts": pytest.approx((5e-3, 0.2)),
        "other": pytest.approx((1e-2, 0.2)),
    }
    projection = made.model.transformer.vlm_proj.weight
    assert any(parameter is projection for parameter in groups["vlm"]["params"])
    frozen = policy(freeze_vision_encoder=True, freeze_language_encoder=True, train_soft_prompts=False)
    assert [group.name for group in frozen.param_groups()] == ["vlm", "other"]
    trained = [name for name, p in frozen.named_parameters() if p.requires_grad and ".vlm." in name]
    assert trained and all("multi_modal_projector" in name for name in trained)


def old_layout(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights as published files have them: written down by hand, not by the code that reads them."""
    named = {}
    for name, value in weights.items():
        inner = name.removeprefix("model.vlm.")
        if inner == name:
            named[name] = value
            continue
        inner = re.sub(r"convs\.(\d)\.conv\.", r"convs.\1.proj.", inner)
        inner = re.sub(r"block\.conv([12])\.", r"block.conv\1.fn.dw.", inner)
        inner = inner.replace("spatial_block.norm1.", "spatial_block.window_attn.norm.")
        inner = inner.replace("channel_block.norm1.", "channel_block.channel_attn.norm.")
        inner = re.sub(r"_attn\.(qkv|proj)\.", r"_attn.fn.\1.", inner)
        inner = inner.replace("block.norm2.", "block.ffn.norm.").replace(".ffn.fc", ".ffn.fn.net.fc")
        if inner == "multi_modal_projector.image_projection.weight":
            inner, value = "image_projection", value.T.contiguous()
        inner = inner.replace("multi_modal_projector.image_position_embed.", "image_pos_embed.")
        inner = inner.replace("multi_modal_projector.", "").replace(
            "language_model.", "language_model.model."
        )
        inner = inner.replace("model.encoder.embed_tokens.weight", "model.shared.weight")
        named[f"model.vlm.{inner}"] = value
    return {**named, "model.vlm.language_model.final_logits_bias": torch.zeros(1, 100)}


def test_weights_in_the_layout_of_published_files(tmp_path):
    config = small_config(tmp_path / "files")
    made = make_policy(config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    weights = unique_state(made)
    save_pretrained(tmp_path / "policy", config, weights, *config.pipelines({}, "cpu"))
    file = tmp_path / "policy" / "model.safetensors"
    old = old_layout(load_file(file))
    projection = old["model.vlm.image_projection"]
    assert projection.shape == (32, 16) and "model.vlm.vision_tower.convs.0.proj.weight" in old
    assert "model.vlm.vision_tower.blocks.2.0.channel_block.channel_attn.fn.qkv.weight" in old
    save_file(old, file)
    loaded = unique_state(load_pretrained(str(tmp_path / "policy")).policy)
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    del old["model.vlm.image_pos_embed.row_embeddings.weight"]
    save_file(old, file)
    with pytest.raises(CheckpointError, match=r"image_position_embed\.row_embeddings\.weight"):
        load_pretrained(str(tmp_path / "policy"))


def test_weights_act_in_the_type_of_the_settings(tmp_path):
    config = small_config(tmp_path / "files", dtype="bfloat16")
    made = make_policy(config)
    save_pretrained(tmp_path / "policy", config, unique_state(made), *config.pipelines({}, "cpu"))
    loaded = load_pretrained(str(tmp_path / "policy")).policy
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    exact = made.eval().predict(batch(), noise(*range(4)))
    rounded = loaded.predict(batch(), noise(*range(4))).float()
    assert 0 < (exact - rounded).abs().max() < 0.1 * exact.abs().max()


def test_it_learns_one_batch_by_heart():
    made, learned = policy(num_denoising_steps=10).train(), batch()
    learned["action"] = learned["action"].cumsum(1) / 3
    settings = OptimizerConfig(lr=1e-2)
    optimizer = build_optimizer(resolve_optimizer(settings, made.config), made)
    losses = []
    for step in range(90):
        loss = made.loss(learned, noise(*range(4), step=step)).per_sample.mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert np.mean(losses[-10:]) < 0.2 * np.mean(losses[:5])
    with torch.no_grad():
        chunk = made.eval().predict(learned, noise(*range(4)))
    assert (chunk - learned["action"]).square().mean() < 0.15 * learned["action"].square().mean()
