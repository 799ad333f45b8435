"""FuseAttention: fires on int8 projections, and leaves everything else with a reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from int8_nets import int8_linear, scales
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import qinductor
from qinductor.backend import qsim
from qinductor.capability import Capability

WIDTH, HEADS = 64, 2
needs_bf16 = pytest.mark.skipif(
    not Capability.detect().avx512_bf16, reason="this CPU lacks avx512_bf16"
)


class SelfAttention(nn.Module):
    """Projections, attention, output projection; ``attend`` is what lies between them."""

    def __init__(self, attend: Callable[..., Tensor] | None = None, float_value: bool = False):
        super().__init__()
        shared = scales(0.02, 128)
        self.query, self.key = (int8_linear(WIDTH, WIDTH, seed=i, static=shared) for i in (0, 1))
        self.value = nn.Linear(WIDTH, WIDTH) if float_value else int8_linear(WIDTH, WIDTH, seed=2)
        self.out = int8_linear(WIDTH, WIDTH, seed=3)
        self.attend = attend or attend_heads

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        return self.out(self.attend(q, k, v, mask))


def heads(t: Tensor) -> Tensor:
    return t.view(*t.shape[:2], HEADS, -1).transpose(1, 2)


def attend_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    y = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), attn_mask=mask)
    return y.transpose(1, 2).contiguous().reshape(q.shape)


def causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    y = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True, scale=0.3)
    return y.transpose(1, 2).reshape(q.shape)


def _run(net: nn.Module, *args: Tensor, **options: object) -> tuple[Tensor, str, dict]:
    net = net.eval().requires_grad_(False)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend=qsim, options=options)
    got, (code, *_) = run_and_get_code(compiled, *args)
    return got, code, qinductor.explain(compiled).to_dict()


@needs_bf16
@pytest.mark.parametrize("attend", [attend_heads, causal])
def test_fires_once_and_keeps_the_result(attend: Callable[..., Tensor]) -> None:
    net = SelfAttention(attend)
    x = torch.randn(2, 9, WIDTH)
    mask = torch.zeros(2, 1, 9, 9).masked_fill(torch.rand(2, 1, 9, 9) < 0.2, -torch.inf)
    got, code, report = _run(net, x, mask)
    assert code.count("Avx512Bf16Attention::run") == 1
    assert "scaled_dot_product" not in code
    fused = [e for e in report["rewrites"] if e["rule"] == "fuse_attention"]
    assert len(fused) == 1
    requantized = [e for e in report["rewrites"] if e["rule"] == "fuse_requantize"]
    assert len(requantized) == 1, "the output projection's codes come out of the attention"
    plain, _, _ = _run(net, x, mask, disable=("fuse_attention",))
    # A code of the attention's output moves by one step at most where bfloat16 rounded it across a
    # boundary, or by what bfloat16 loses of the values: 2**-7 of at most 3 codes of 0.03.
    step = float(net.out.x_scale)
    weight = net.out.weight
    moved = (step + 2.0**-7 * 255 * step) * weight.abs().sum(dim=1).max()
    assert (got - plain).abs().max() <= moved
    assert F.cosine_similarity(got.flatten(), plain.flatten(), dim=0) > 0.999


def other_reader(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return attend_heads(q, k, v, mask) + q


def not_side_by_side(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v)).reshape(q.shape)


def no_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]


def packed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """All sequences as one: every query sees the keys of the other sequences too."""
    one = (t.reshape(1, -1, HEADS, WIDTH // HEADS).transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(*one)
    return y.transpose(1, 2).reshape(1, -1, WIDTH)


def heads_below(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    y = F.scaled_dot_product_attention(heads(q), heads(k), heads(v))
    rows = y.transpose(1, 2).reshape(q.shape[0], -1, WIDTH // HEADS)
    return torch.cat((rows, rows), dim=-1)


@needs_bf16
@pytest.mark.parametrize(
    ("net", "options", "reason"),
    [
        (lambda: SelfAttention(packed), {}, "not one row of heads each"),
        (lambda: SelfAttention(heads_below), {}, "not (batch, sequence, features)"),
        (lambda: SelfAttention(other_reader), {}, "other readers"),
        (lambda: SelfAttention(not_side_by_side), {}, "not put side by side"),
        (lambda: SelfAttention(no_heads), {}, "not a projection seen as heads"),
        (lambda: SelfAttention(float_value=True), {}, "not the output of an int8 linear"),
        (SelfAttention, {"isa": "avx2"}, "needs avx512_bf16"),
    ],
    ids=["packed", "heads-below", "reader", "layout", "no-heads", "float", "isa"],
)
def test_near_misses_are_left_alone_with_a_reason(net, options, reason) -> None:  # type: ignore[no-untyped-def]
    model = net()
    x = torch.randn(2, 9, WIDTH)
    got, code, report = _run(model, x, **options)
    assert "Avx512Bf16Attention::run" not in code
    refusals = [e["detail"] for e in report["refusals"] if e["rule"] == "fuse_attention"]
    assert len(refusals) == 1 and reason in refusals[0]
    with torch.no_grad():
        want = model(x)
    assert F.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.9999
