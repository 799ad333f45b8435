"""SinkSelect: rows that nobody reads are not computed, and the row that is read stays the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from foreign import Capture, capture
from int8_nets import int8_linear, same_bits, scales
from torch import Tensor, nn

import qinductor
from qinductor.capability import Capability
from qinductor.passes.base import value
from qinductor.passes.sink_select import SinkSelect

ops = torch.ops.qinductor
WIDTH, LENGTH = 64, 7


class Encoder(nn.Module):
    """Int8 linears in a feed-forward block with a normalization; ``read`` is what follows."""

    def __init__(self, read: Callable[..., Any], *, dynamic: bool = False):
        super().__init__()
        given = {"dynamic": dynamic, "static": scales(0.03)}
        self.up, self.down = (int8_linear(WIDTH, WIDTH, seed=s, **given) for s in (1, 2))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("positions", torch.randn(LENGTH, WIDTH))
        self.read = read

    def forward(self, x: Tensor) -> Any:
        y = self.down(torch.relu(self.up(x))) + x
        return self.read(self.norm(y), self)


def _captured(read: Callable[..., Any], x: Tensor | None = None, **net: Any) -> Capture:
    dynamic = net.pop("shapes", False)
    x = torch.randn(3, LENGTH, WIDTH) if x is None else x
    return capture(Encoder(read, **net), x, SinkSelect(), dynamic=dynamic)


def _rows_of_linears(found: Capture) -> list[Any]:
    nodes = [n for n in found.after.graph.nodes if n.target is ops.qlinear.default]
    return [value(n).shape[1] for n in nodes]


@pytest.mark.parametrize("index", [0, 3, LENGTH - 1, -2])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "per token"])
def test_only_the_row_that_is_read_is_computed(index: int, dynamic: bool) -> None:
    found = _captured(lambda y, net: y[:, index], dynamic=dynamic)
    assert _rows_of_linears(found) == [1, 1]
    assert {e.site for e in found.entries} == {"up", "down"}
    assert found.details("fused") == ["computes the one position that is read"] * 2
    assert same_bits(*found.outputs())


def test_lengths_that_are_not_known_yet() -> None:
    found = _captured(lambda y, net: y[:, 0], shapes=True)
    assert _rows_of_linears(found) == [1, 1] and same_bits(*found.outputs())


def test_an_addend_without_a_batch_is_read_at_the_same_position() -> None:
    found = _captured(lambda y, net: torch.tanh(y + net.positions)[:, 4])
    assert _rows_of_linears(found) == [1, 1] and same_bits(*found.outputs())


def test_the_head_behind_the_select_stays() -> None:
    found = _captured(lambda y, net: torch.tanh(y[:, 0]) * 2)
    assert _rows_of_linears(found) == [1, 1] and same_bits(*found.outputs())


def _also_whole(y: Tensor, net: Encoder) -> tuple[Tensor, Tensor]:
    return y[:, 0], y


def _two_positions(y: Tensor, net: Encoder) -> Tensor:
    return y[:, 0] + y[:, 1]


def _mixed_rows(y: Tensor, net: Encoder) -> Tensor:
    return torch.softmax(y, dim=1)[:, 0]


def _along_columns(y: Tensor, net: Encoder) -> Tensor:
    return y[:, :, 0]


def _by_batch(y: Tensor, net: Encoder) -> Tensor:
    return y[0]


@pytest.mark.parametrize(
    "read", [_also_whole, _two_positions, _mixed_rows, _along_columns, _by_batch]
)
def test_near_misses_compute_all_rows(read: Callable[..., Any]) -> None:
    found = _captured(read)
    assert _rows_of_linears(found) == [LENGTH, LENGTH] and not found.details("fused")
    assert same_bits(*found.outputs())


def _scales_read_whole(y: Tensor, net: Encoder) -> tuple[Tensor, Tensor]:
    codes, scale = ops.quantize_per_token(y)
    return (codes.float() * scale)[:, 2], scale


def _mean_read_whole(y: Tensor, net: Encoder) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(y, [2], correction=0, keepdim=True)
    return ((y - mean) * variance.rsqrt())[:, 2], mean


@pytest.mark.parametrize("read", [_scales_read_whole, _mean_read_whole])
def test_one_output_of_several_is_read_whole(read: Callable[..., Any]) -> None:
    """The operator computes all rows; what is read of its other output is sliced."""
    found = _captured(read)
    assert _rows_of_linears(found) == [LENGTH, LENGTH]
    assert same_bits(*found.outputs())


def test_a_reduction_without_its_dimension_is_no_row() -> None:
    """With as many sequences as positions, (batch,) would pass for (positions,)."""

    def read(y: Tensor, net: Encoder) -> Tensor:
        return (y - y.mean(dim=2)[:, :, None].transpose(0, 1) + y.mean(dim=2)[:, None])[:, 1]

    x = torch.randn(WIDTH, WIDTH, WIDTH)
    found = _captured(read, x)
    assert same_bits(*found.outputs())


class FloatFirst(nn.Module):
    """A float Linear, whose view computes with sizes, before an int8 one and a select."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.int8 = nn.Linear(WIDTH, WIDTH), int8_linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.int8(self.kept(x))[:, 0]


def test_sizes_that_are_nodes_are_no_rows() -> None:
    net = FloatFirst().eval().requires_grad_(False)
    found = capture(net, torch.randn(3, LENGTH, WIDTH), SinkSelect(), dynamic=True)
    assert _rows_of_linears(found) == [1]


def test_a_sequence_of_one_is_left_alone() -> None:
    found = _captured(lambda y, net: y[:, 0], torch.randn(3, 1, WIDTH))
    assert not found.entries


class Attending(nn.Module):
    """Attention between int8 projections, and an int8 projection behind it."""

    def __init__(self, *, causal: bool):
        super().__init__()
        given = scales(0.02, 128)
        self.q, self.k, self.v, self.out = (
            int8_linear(WIDTH, WIDTH, seed=s, static=given) for s in range(4)
        )
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:2], 2, -1).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mask = None if self.causal else (x[:, None, None, :, 0] > -1).expand(-1, 1, x.shape[1], -1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(x.shape))[:, 2]


@pytest.mark.skipif(not Capability.detect().avx512_bf16, reason="this CPU lacks avx512_bf16")
@pytest.mark.parametrize("causal", [False, True])
def test_attention_reads_all_keys_for_the_one_query(causal: bool) -> None:
    x = torch.randn(2, LENGTH, WIDTH)
    results = {}
    for disable in ((), ("sink_select",)):
        net = Attending(causal=causal).eval().requires_grad_(False)
        torch._dynamo.reset()
        compiled = torch.compile(net, backend="qsim", options={"disable": disable})
        results[disable] = compiled(x)
        fused = [
            e["site"]
            for e in qinductor.explain(compiled).to_dict()["rewrites"]
            if e["rule"] == "sink_select"
        ]
        want = [] if disable else ["out"] if causal else ["q", "out"]
        assert fused == want, "a causal mask counts its keys from the first query"
    assert torch.equal(*results.values())
