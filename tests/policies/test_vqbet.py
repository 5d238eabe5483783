"""VQ-BeT's two phases, and what must not depend on how a batch is split."""

import pytest
import torch

from flexor.core.batch import ACTION, ENV_STATE, STATE
from flexor.core.errors import ConfigError
from flexor.core.rng import Noise
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.vqbet.config import VQBeTConfig
from flexor.policies.vqbet.policy import VQBeT, focal_loss
from flexor.policies.vqbet.vector_quantizer import Codebook
from parity.fill import uniform
from parity.vqbet.cases import TINY

CAMERA = "observation.image"
INPUTS = {
    CAMERA: PolicyFeature(Kind.VISUAL, (3, 40, 48)),
    STATE: PolicyFeature(Kind.STATE, (4,)),
}
OUTPUTS = {ACTION: PolicyFeature(Kind.ACTION, (3,))}
SIZE = 6  # of a batch


def make(**settings) -> VQBeT:
    fields = {**TINY, "input_features": INPUTS, "output_features": OUTPUTS, **settings}
    torch.manual_seed(0)
    return VQBeT(VQBeTConfig(**fields)).train()


def a_batch(config: VQBeTConfig) -> dict:
    steps, actions = config.n_obs_steps, len(config.action_deltas)
    shapes = {CAMERA: (steps, 3, 40, 48), STATE: (steps, 4), ACTION: (actions, 3)}
    batch = {k: torch.from_numpy(uniform(k, (SIZE, *shape), -1, 1)) for k, shape in shapes.items()}
    return {**batch, "index": torch.arange(SIZE)}


def part(batch: dict, begin: int, end: int) -> tuple[dict, Noise]:
    selected = {key: value[begin:end] for key, value in batch.items()}
    return selected, Noise(0, 7, selected["index"])


def trained(policy: VQBeT) -> set[str]:
    """Which parts of the policy a loss reaches."""
    policy.zero_grad()
    policy(*part(a_batch(policy.config), 0, SIZE)).per_sample.mean().backward()
    return {"vqvae" if "vqvae" in n else "rest" for n, p in policy.named_parameters() if p.grad is not None}


def flags(policy: VQBeT) -> tuple[bool, bool]:
    return bool(policy.vqvae.discretized), bool(policy.vqvae.vq_layer.freeze_codebook)


def test_the_phase_follows_from_the_step():
    policy = make(n_vqvae_training_steps=3)
    phases = []
    for step in range(5):
        policy.begin_step(step)
        phases.append((trained(policy), flags(policy)))
    vocabulary, behavior = {"vqvae"}, {"rest"}
    # saved after the third step, it is a policy whose vocabulary is trained
    assert phases[:2] == [(vocabulary, (False, False))] * 2
    assert phases[2] == (vocabulary, (True, True))
    assert phases[3:] == [(behavior, (True, True))] * 2


def test_every_parameter_is_trained_in_one_of_the_phases():
    policy = make(sequentially_select=True)
    policy.begin_step(0)
    reached = set()
    for step in (0, 2):
        policy.begin_step(step)
        trained(policy)
        reached |= {name for name, p in policy.named_parameters() if p.grad is not None}
    assert reached == {name for name, _ in policy.named_parameters()}
    grouped = [p for group in policy.param_groups() for p in group.params]
    assert len(grouped) == len(set(grouped)) == len(reached)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_goes_on_in_the_phase_it_was_saved_in(step):
    policy, again = make(n_vqvae_training_steps=2), make(n_vqvae_training_steps=2)
    for done in range(step):
        policy.begin_step(done)
        trained(policy)
    again.load_state_dict(policy.state_dict())
    for each in (policy, again):
        each.begin_step(step)
    assert trained(policy) == trained(again)
    assert_same_state(policy, again, 0)


def test_a_trained_vocabulary_is_not_trained_again():
    """`--policy.path` of a checkpoint of the second phase, for a run that begins at step 0."""
    done = make(n_vqvae_training_steps=1)
    done.begin_step(0)
    policy = make(n_vqvae_training_steps=20)
    policy.load_state_dict(done.state_dict())
    policy.begin_step(0)
    before = policy.vqvae.vq_layer.codebooks[0].embed.clone()
    assert trained(policy) == {"rest"}
    assert torch.equal(policy.vqvae.vq_layer.codebooks[0].embed, before)


def test_codes_learn_from_all_micro_batches_of_a_step_alike():
    undivided, split = make(), make()
    batch = a_batch(undivided.config)
    for step in range(2):
        for policy, parts in ((undivided, [(0, 6)]), (split, [(0, 1), (1, 4), (4, 6)])):
            policy.begin_step(step)
            policy.zero_grad()
            for begin, end in parts:
                (policy.loss(*part(batch, begin, end)).per_sample.sum() / SIZE).backward()
        for parameter, other in zip(undivided.parameters(), split.parameters()):
            assert (parameter.grad is None) == (other.grad is None)
            assert parameter.grad is None or torch.allclose(parameter.grad, other.grad, atol=1e-6)
        assert_same_state(undivided, split, 1e-5)


def test_held_out_data_teaches_no_codes():
    policy = make()
    policy.begin_step(0)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    policy.eval().loss(*part(a_batch(policy.config), 0, SIZE))
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


@pytest.mark.parametrize("settings", [{}, {"sequentially_select": True}, {"use_group_norm": False}])
def test_a_samples_loss_does_not_depend_on_its_batch(settings):
    policy = make(**settings, n_vqvae_training_steps=1)
    policy.begin_step(0)
    policy.begin_step(1)
    if not policy.config.use_group_norm:
        policy.eval()  # while training, batch normalisation is of the batch of all ranks
    batch = a_batch(policy.config)
    loss = policy.loss(*part(batch, 0, SIZE))
    parts = [policy.loss(*part(batch, begin, begin + 2)) for begin in range(0, SIZE, 2)]
    assert torch.allclose(loss.per_sample, torch.cat([p.per_sample for p in parts]), rtol=1e-5)
    chunks = [policy.eval().predict(*part(batch, begin, begin + 2)) for begin in range(0, SIZE, 2)]
    assert torch.allclose(policy.predict(*part(batch, 0, SIZE)), torch.cat(chunks), atol=1e-5)


def test_codes_are_drawn_as_likely_as_they_are_predicted():
    policy = make(bet_softmax_temperature=0.5)
    logits = torch.tensor([0.0, 0.4, -0.3, 1.0, 0.2, -2.0])
    noise = Noise(0, 0, torch.arange(20_000))
    codes = policy.vqbet.action_head._draw(logits, noise.uniform("codes", (20_000, 6)))
    shares = torch.bincount(codes, minlength=6) / len(codes)
    assert torch.allclose(shares, (logits / 0.5).softmax(-1), atol=0.01)


def test_focal_loss_is_cross_entropy_for_what_is_unlikely():
    logits, target = torch.tensor([[9.0, -9.0], [-9.0, 9.0]]), torch.tensor([0, 0])
    likely, unlikely = focal_loss(logits, target)
    assert likely < 1e-12 and unlikely == pytest.approx(18.0)


def test_codes_move_to_the_vectors_mapped_to_them():
    torch.manual_seed(1)
    centres = torch.tensor([[4.0, 0.0], [-4.0, 1.0], [0.0, -4.0]])
    codebook = Codebook(3, 2)
    codebook.embed[0] = codebook.embed_avg[0] = centres + torch.randn(3, 2)
    codebook.cluster_size.fill_(1.0)
    for _ in range(40):
        codebook.begin_step()
        codebook(centres.repeat_interleave(20, 0) + 0.1 * torch.randn(60, 2), learn=True)
    assert torch.allclose(codebook.embed[0], centres, atol=0.1)
    assert torch.allclose(codebook.cluster_size, torch.full((1, 3), 20.0), atol=0.1)


@pytest.mark.parametrize("step", [0, 2])
def test_lower_precision_stays_near(step):
    policy = make()
    for begun in range(step + 1):
        policy.begin_step(begun)
    batch = a_batch(policy.config)
    features = policy.vqbet.rgb_encoder(batch[CAMERA], part(batch, 0, SIZE)[1])
    policy.vqbet.rgb_encoder.forward = lambda *_: features  # a CPU takes a minute for one picture in bfloat16
    full = policy.loss(*part(batch, 0, SIZE)).per_sample
    with torch.autocast("cpu", torch.bfloat16):
        low = policy.loss(*part(batch, 0, SIZE)).per_sample
    low.mean().backward()
    assert torch.allclose(low.float(), full, rtol=0.1)


def test_declares_only_what_it_looks_at():
    """LeRobot counts a token for each declared feature."""
    more = {
        **INPUTS,
        ENV_STATE: PolicyFeature(Kind.ENV, (2,)),
        "observation.force": PolicyFeature(Kind.STATE, (6,)),
    }
    assert VQBeTConfig(input_features=more).input_features == INPUTS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"action_chunk_size": 0}, "policy.action_chunk_size=0"),
        ({"gpt_n_head": 3}, "multiple of policy.gpt_n_head=3"),
        ({"gpt_block_size": 9}, "too small for the 10 tokens"),
        ({"bet_softmax_temperature": 0.0}, "policy.bet_softmax_temperature=0.0"),
        ({"dropout": 1.0}, "policy.dropout=1.0"),
        ({"crop_shape": (41, 40)}, "does not fit into observation.image"),
        ({"pretrained_backbone_weights": "ResNet18_Weights.IMAGENET1K_V1"}, "use_group_norm"),
        ({"input_features": {CAMERA: INPUTS[CAMERA]}}, "one camera and observation.state"),
        ({"input_features": {**INPUTS, "observation.images.b": INPUTS[CAMERA]}}, "one camera"),
        ({"vision_backbone": "vit"}, "policy.vision_backbone='vit'"),
    ],
)
def test_refuses_what_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        make(**settings)


def assert_same_state(vqbet: VQBeT, other: VQBeT, tolerance: float) -> None:
    for (name, mine), theirs in zip(vqbet.state_dict().items(), other.state_dict().values()):
        assert torch.allclose(mine.float(), theirs.float(), atol=tolerance, rtol=0), name
