"""pi0-FAST at small sizes: what it encodes, decodes and saves. LeRobot's numbers: tests/parity/pi0_fast."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexor.core.log import _warn_once
from flexor.core.rng import Noise
from flexor.policies.adapters import LoraConfig, LoraLinear, add_adapters
from flexor.policies.nn.rope import make_rope
from flexor.policies.pi0_fast.action_tokens import ACTION_TOKENS, ActionVocabulary, TokenizeActions
from flexor.policies.pi0_fast.policy import SEGMENT, mean_over_tokens
from flexor.policies.pretrained import Pretrained, load_pretrained, save_pretrained
from flexor.policies.processing.pipeline import PREPROCESSOR, Pipeline
from parity import flexor_side
from parity.inputs import BATCH, TASKS, observation
from parity.kinds import cases_of
from parity.pi0_fast.cases import FIRST, fill_policy, training_batch
from parity.pi0_fast.flexor import prepared
from support.small_pi import WRITTEN

pytest.importorskip("transformers")
NOISE = Noise(0, 0, torch.arange(BATCH))


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return cases_of("pi0_fast", tmp_path_factory.mktemp("pi0_fast") / "files")["default"]


@pytest.fixture(scope="module")
def vocabulary(case):
    return ActionVocabulary.load(
        case["settings"]["text_tokenizer_name"], case["settings"]["fast_skip_tokens"]
    )


def make(case: dict, **settings: object) -> Pretrained:
    with prepared(case["folder"]):
        made = flexor_side.make_policy("pi0_fast", {**case, "settings": {**case["settings"], **settings}})
    fill_policy(made.policy)
    return made


def batch_of(made: Pretrained, case: dict) -> dict:
    return made.preprocessor({**flexor_side.tensors(training_batch(case)), "task": TASKS})


def chunk(made: Pretrained, case: dict) -> np.ndarray:
    return made.chunk(observation(case["inputs"], "now"), TASKS, NOISE)


def test_the_chunk_is_decoded_as_long_as_it_is_however_many_actions_are_executed(case):
    """LeRobot decodes as many steps as are executed, which makes other actions of the same tokens."""
    all_steps, few = (chunk(make(case, n_action_steps=steps), case) for steps in (6, 2))
    assert few.shape == (BATCH, 6, 3)
    np.testing.assert_array_equal(all_steps, few)


def test_decoded_tokens_are_those_that_the_loss_expects(case):
    """With a cache and without one, the same tokens are the most likely ones."""
    made = make(case, max_decoding_steps=12)
    policy = made.policy.eval()
    batch = batch_of(made, case)
    with torch.no_grad():
        decoded = policy.decoded_tokens(policy.generate(batch, NOISE))
        start = torch.full((BATCH, 1), policy.vocabulary.bos)
        likely = torch.cat((start, decoded), 1)
        best = policy.paligemma.token_losses(policy._prefix(batch), likely)
        for place in (1, 4, 9):
            other = likely.clone()
            other[:, place] = torch.where(other[:, place] == FIRST, FIRST - 1, FIRST)
            worse = policy.paligemma.token_losses(policy._prefix(batch), other)
            assert (worse[:, place - 1] > best[:, place - 1]).all()
            torch.testing.assert_close(
                worse[:, : place - 1], best[:, : place - 1]
            )  # later words are not seen


def decode_with_growing_cache(policy, batch: dict, noise: Noise) -> torch.Tensor:
    """The tokens, decoded with a cache that grows by one token at a time."""
    paligemma, prefix = policy.paligemma, policy._prefix(batch)
    decoder, mask, cache = paligemma.decoder, prefix.mask, prefix.layers
    token = torch.full((len(mask),), policy.vocabulary.bos)
    finished, tokens = torch.zeros(len(mask), dtype=torch.bool), []
    for step in range(policy.config.max_decoding_steps):
        rope = make_rope(mask.sum(1, keepdim=True), decoder.size.head_dim)
        mask = torch.cat((mask, torch.ones(len(mask), 1, dtype=torch.bool)), 1)
        x, longer = decoder.embed_tokens(token[:, None]), []
        for layer, layer_cache in zip(decoder.layers, cache, strict=True):
            x, new = layer(x, rope, mask[:, None, None], layer_cache)
            longer.append(layer_cache.append(new))
        cache = longer
        logits = paligemma.lm_head(decoder.norm(x)[0][:, 0]).float()
        token = logits.argmax(-1)
        if policy.config.temperature:
            cumulative = (logits / policy.config.temperature).softmax(-1).cumsum(-1)
            uniform = noise.uniform(f"word {step}", (len(logits),))
            token = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:]).squeeze(1)
        tokens.append(token)
        finished |= token == policy.vocabulary.end
        if (step + 1) % SEGMENT == 0 and finished.all():
            break
    return torch.stack(tokens, 1)


def decoded_length(tokens: torch.Tensor, end: int) -> int:
    """How many of the tokens [B, T] are decoded: until the host asks and all samples are finished."""
    ends = [row.index(end) if end in row else tokens.shape[1] for row in tokens.tolist()]
    return min(SEGMENT * (1 + max(ends) // SEGMENT), tokens.shape[1])


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_tokens_are_those_of_a_growing_cache(case, temperature):
    """Also if samples end at different tokens, early, in another segment than the last one, or not at all."""
    made = make(case, max_decoding_steps=30, temperature=temperature)
    policy, batch = made.policy.eval(), batch_of(made, case)
    with torch.no_grad():
        tokens = decode_with_growing_cache(policy, batch, NOISE)
        assert tokens.shape[1] == 30
        # what it decodes does not depend on which token is the end: try one for each possible length
        ends = {decoded_length(tokens, end): end for end in range(WRITTEN)}
        for length, end in ends.items():
            policy.vocabulary = policy.vocabulary._replace(end=end)
            state = policy.generate(batch, NOISE)
            assert torch.equal(policy.decoded_tokens(state), tokens[:, :length])
            assert state.finished.tolist() == (state.tokens[:, : int(state.step)] == end).any(1).tolist()
    assert len(ends) > 1 and 30 in ends


class Watched(TorchDispatchMode):
    """What is computed: operators and shapes. A graph can't have those that make the host wait."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "item")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[-1]
        assert not name.startswith(self.WAITS), name
        out = function(*args, **(kwargs or {}))
        self.calls.append((name, [x.shape for x in args if isinstance(x, torch.Tensor)]))
        return out


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_every_segment_is_the_same_and_in_place(case, temperature):
    """As a CUDA graph needs it: the same operations on the same memory, and nothing is asked of the GPU."""
    made = make(case, max_decoding_steps=24, temperature=temperature)
    policy, batch = made.policy.eval(), batch_of(made, case)
    with torch.inference_mode():
        state = policy.prefill(batch, NOISE)
        segments = []
        for _ in range(policy.max_segments):
            with Watched() as watched:
                policy.decode_segment(state)
            tensors = [x for layer in state.kv_cache for x in layer]
            tensors += [x for x in vars(state).values() if isinstance(x, torch.Tensor)]
            segments.append((watched.calls, [x.data_ptr() for x in tensors]))
        assert segments[0] == segments[1] == segments[2]
        assert torch.equal(policy.decoded_tokens(state), policy.decoded_tokens(policy.generate(batch, NOISE)))


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_a_graph_decodes_what_eager_mode_decodes(case, temperature):
    made = make(case, max_decoding_steps=30, temperature=temperature)
    made.policy.cuda()
    noise = [Noise(0, step, torch.arange(BATCH)) for step in range(4)]
    batches = [{**batch_of(made, case), "memory": {}} for _ in noise]
    batches = [{k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in b.items()} for b in batches]
    graphs = [made.predict(batch, each.to("cuda")) for batch, each in zip(batches, noise)]
    assert made.graphs.captured and not made.graphs.gave_up
    made.graphs.gave_up = True
    eager = [made.predict(batch, each.to("cuda")) for batch, each in zip(batches, noise)]
    assert all(torch.equal(captured, plain) for captured, plain in zip(graphs, eager))


def test_any_tokens_decode_to_actions_with_a_warning(case, monkeypatch, caplog):
    made = make(case, validate_action_token_prefix=True)
    for rows in ([[5, 0, 1]] * BATCH, [[made.policy.vocabulary.end]] * BATCH, [[400] * 50] * BATCH):
        caplog.clear()
        monkeypatch.setattr(made.policy, "decoded_tokens", lambda *_, rows=rows: torch.tensor(rows))
        assert np.isfinite(chunk(made, case)).all()
        assert f"the tokens of {BATCH} are not those of a full chunk" in caplog.text


def test_encoded_actions_decode_to_themselves(case, vocabulary, caplog):
    """Actions far outside of the range are clipped, with a warning."""
    _warn_once.cache_clear()
    made = make(case)
    step = next(step for step in made.preprocessor.steps if isinstance(step, TokenizeActions))
    actions = torch.sin(torch.arange(BATCH * 6 * 3).reshape(BATCH, 6, 3) / 7)
    read = [vocabulary.decode(row[1:]) for row in step({"action": actions})[ACTION_TOKENS].tolist()]
    assert all(begins for _, begins in read)
    decoded = made.policy.fast.decode([tokens for tokens, _ in read], 6, 3)
    assert decoded.problems == [""] * BATCH
    assert np.abs(decoded.actions - actions.numpy()).max() < 0.15  # rounding to tenths
    assert not caplog.records
    step({"action": 30 * actions})
    assert "beyond the range of the FAST tokenizer" in caplog.text


def test_tokens_of_a_chunk(vocabulary):
    encoded = vocabulary.encode([0, 5])
    assert encoded == [vocabulary.bos, *vocabulary.prefix, FIRST, FIRST - 5, *vocabulary.suffix]
    assert vocabulary.decode(encoded[1:]) == ([0, 5], True)
    assert vocabulary.decode([FIRST, *vocabulary.prefix, FIRST - 1, vocabulary.end, FIRST]) == ([0, 1], False)
    assert vocabulary.decode([]) == ([], False)


def test_sampled_tokens_depend_on_the_noise_alone(case):
    made = make(case, temperature=5.0)
    first, again = chunk(made, case), chunk(made, case)
    np.testing.assert_array_equal(first, again)
    other = made.chunk(observation(case["inputs"], "now"), TASKS, Noise(1, 0, torch.arange(BATCH)))
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, chunk(make(case), case))


def test_the_loss_of_a_sample_does_not_depend_on_the_others(case):
    made = make(case)
    batch = batch_of(made, case)
    with torch.no_grad():
        both = made.policy.loss(batch, NOISE).per_sample
        for n in range(BATCH):
            alone = {key: value[n : n + 1] for key, value in batch.items() if isinstance(value, torch.Tensor)}
            torch.testing.assert_close(made.policy.loss(alone, NOISE).per_sample, both[n : n + 1])
    errors, mask = torch.tensor([[1.0, 3.0], [5.0, 9.0]]), torch.tensor([[True, True], [True, False]])
    assert mean_over_tokens(errors, mask).tolist() == [2, 5]


def test_saved_and_loaded_it_acts_the_same(case, tmp_path):
    made = make(case)
    parts = made.preprocessor, made.postprocessor
    save_pretrained(tmp_path, made.policy.config, made.policy.state_dict(), *parts)
    with prepared(case["folder"]):
        np.testing.assert_array_equal(chunk(load_pretrained(str(tmp_path)), case), chunk(made, case))


def test_bfloat16_weights_act(case):
    made = make(case, dtype="bfloat16")
    assert made.policy.paligemma.lm_head.weight.dtype == torch.bfloat16
    assert np.isfinite(chunk(made, case)).all()
    made.policy.loss(batch_of(made, case), NOISE).per_sample.mean().backward()


def test_adapters_are_on_queries_and_values_by_default(case):
    policy = make(case).policy
    add_adapters(policy, LoraConfig(r=2), 0, policy.config.lora_targets())
    adapted = [name for name, module in policy.named_modules() if isinstance(module, LoraLinear)]
    assert len(adapted) == 2 * len(policy.paligemma.decoder.layers)
    assert all(name.endswith(("q_proj", "v_proj")) and "language_model" in name for name in adapted)


def test_a_chunk_of_too_many_tokens_is_cut_off_and_it_is_said(case, caplog):
    _warn_once.cache_clear()
    out = batch_of(make(case, max_action_tokens=10), case)
    assert out[ACTION_TOKENS].shape == (BATCH, 10)
    assert "max_action_tokens=10 tokens: their end is cut off" in caplog.text


def test_the_step_reads_what_lerobot_saves_and_rehearses_without_files(case, tmp_path):
    theirs = {"trust_remote_code": True, "max_action_tokens": 40, "action_tokenizer_name": "x/y"}
    step = TokenizeActions.from_config(theirs)
    assert step.fast_skip_tokens == 128
    actions = {"action": torch.empty(2, 6, 3, device="meta")}
    assert step.rehearse(actions)[ACTION_TOKENS].shape == (2, 40)
    observed = {"task": ["a"]}
    assert step(observed) is observed  # without actions there is nothing to write
    local_step = replace(
        step,
        action_tokenizer_name=case["settings"]["action_tokenizer_name"],
        paligemma_tokenizer_name=case["settings"]["text_tokenizer_name"],
    )
    Pipeline(PREPROCESSOR, [local_step]).save(tmp_path)
    assert Pipeline.load(tmp_path, PREPROCESSOR).steps[0].config() == local_step.config()
