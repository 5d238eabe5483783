"""The kernels of language models compute what torch computes, for all shapes that the policies have."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexor.kernels import language_model as module
from flexor.kernels.language_model import attend_few, can_attend_few, gated, rms_norm, rotate
from flexor.policies.nn.rope import make_rope

CLOSE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def far(ours: Tensor, theirs: Tensor) -> float:
    """The largest error, relative to the largest value."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    ours, theirs = ours.double(), theirs.double()
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.fixture
def plain(monkeypatch):
    """Inside, what the kernels compute is computed by torch."""

    def without(function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(module, "_fused", lambda *_: False)
            return function(*arguments)

    return without


def with_gradients(function, *inputs: Tensor) -> list[Tensor]:
    """The output, and the gradients of inputs and weights for one and the same gradient of the output."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    out = function(*leaves)
    torch.manual_seed(1)
    out.backward(torch.randn(out.shape).to(out))
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(gradients) == len(leaves)
    return [out.detach(), *gradients]


def assert_close(ours: list[Tensor], theirs: list[Tensor], limit: float) -> None:
    for our, their in zip(ours, theirs, strict=True):
        assert far(our, their) < limit


@pytest.mark.gpu
@pytest.mark.parametrize("round_normed", [False, True])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 51, 1024), (1, 7, 720), (3, 2048), (1, 1, 16), (2, 700, 4, 128)], ids=str
)
def test_norm(shape, dtype, round_normed, plain):
    x, weight = torch.randn(shape).to("cuda", dtype), torch.randn(shape[-1], device="cuda")
    for plus, out in ((0.0, torch.float32), (1.0, torch.bfloat16)):

        def norm(x, weight, plus=plus, out=out):
            return rms_norm(x, weight, plus, 1e-6, out, round_normed)

        limit = max(CLOSE[out], CLOSE[dtype])
        assert_close(with_gradients(norm, x, weight), plain(with_gradients, norm, x, weight), limit)
        with torch.inference_mode():
            assert far(norm(x, weight), plain(norm, x, weight)) < limit


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("shape", [(2, 51, 8, 256), (1, 50, 15, 64), (3, 5, 1, 256), (2, 3, 5, 64)], ids=str)
def test_rotation(shape, dtype, plain):
    x = torch.randn(shape).to("cuda", dtype)
    for batch in {1, shape[0]}:
        positions = torch.randint(0, 700, (batch, shape[1]), device="cuda")
        rope = make_rope(positions, shape[-1])

        def rotated(x, rope=rope):
            return rotate(x, *rope)

        assert_close(with_gradients(rotated, x), plain(with_gradients, rotated, x), CLOSE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("by", ["gelu", "silu"])
def test_gate(by, dtype, plain):
    gate, up = ((3 * torch.randn(3, 51, 4099)).to("cuda", dtype) for _ in range(2))

    def product(gate, up):
        return gated(gate, up, by)

    assert_close(with_gradients(product, gate, up), plain(with_gradients, product, gate, up), CLOSE[dtype])


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The definition, in float64."""
    q, k, v = (each.double() for each in (q, k, v))
    k, v = (each.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for each in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "kv_heads", "width", "keys"),
    [
        (1, 51, 8, 1, 256, 611),
        (8, 51, 8, 1, 256, 611),
        (3, 50, 15, 5, 64, 227),
        (2, 1, 8, 1, 256, 40),
        (2, 128, 4, 4, 128, 33),
    ],
)
@torch.inference_mode()
def test_attention_of_few_tokens(batch, tokens, heads, kv_heads, width, keys, dtype):
    q = torch.randn(batch, tokens, heads, width).to("cuda", dtype)
    k, v = (torch.randn(batch, keys, kv_heads, width).to("cuda", dtype) for _ in range(2))
    assert can_attend_few(q, k)
    rows = torch.rand(batch, 1, tokens, keys, device="cuda") < 0.7
    rows[..., 0] = True
    late = torch.arange(keys, device="cuda") > keys // 2  # nothing at the beginning
    for mask in (rows, rows[:, :, :1], late.expand(batch, 1, 1, keys)):
        assert far(attend_few(q, k, v, mask).double(), attention(q, k, v, mask)) < CLOSE[dtype]
    longer = torch.randn(batch, keys, 2 * kv_heads, width).to("cuda", dtype)[:, :, ::2]  # strides of a part
    assert far(attend_few(q, longer, v, rows).double(), attention(q, longer, v, rows)) < CLOSE[dtype]


def test_only_where_no_gradient_is_wanted():
    q = torch.randn(1, 4, 2, 64, dtype=torch.bfloat16)
    assert not can_attend_few(q, q)  # not on a GPU
    if torch.cuda.is_available():
        q = q.cuda()
        assert not can_attend_few(q, q)
        with torch.inference_mode():
            assert can_attend_few(q, q) and not can_attend_few(q.float(), q.float())
            assert not can_attend_few(q[..., :48].contiguous(), q[..., :48].contiguous())


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_plan_of_all_of_them(recomputed: bool) -> None:
    """On the meta device, as a plan runs them, also with activations that are recomputed."""

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        normed = rms_norm(x, weight, 1.0, 1e-6, torch.bfloat16)
        rope = make_rope(torch.zeros(1, 5, dtype=torch.long, device="meta"), 16)
        return gated(rotate(normed[:, :, None], *rope)[:, :, 0], normed, "gelu")

    x = torch.empty(2, 5, 16, device="meta", requires_grad=True)
    weight = torch.empty(16, device="meta", requires_grad=True)
    out = checkpoint(layer, x, weight, use_reentrant=False) if recomputed else layer(x, weight)
    out.sum().backward()
    assert x.grad is not None and x.grad.dtype == x.dtype and x.grad.shape == x.shape
    assert weight.grad is not None and weight.grad.shape == weight.shape
