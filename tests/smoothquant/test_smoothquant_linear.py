"""QuantizedLinear, against the integer definition written out in numpy-like steps."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qinductor.smoothquant import QuantizedLinear
from qinductor.smoothquant.smoothing import TINY, affine_scale, quantize_weight


def _layer(
    n: int, k: int, *, static: bool, bias: bool = True, smooth: bool = False
) -> QuantizedLinear:
    generator = torch.Generator().manual_seed(n * 1000 + k)
    codes, w_scale = quantize_weight(torch.randn(n, k, generator=generator))
    factors = torch.rand(k, generator=generator) + 0.5 if smooth else None
    shift = torch.randn(n, generator=generator) if bias else None
    if not static:
        multiplier = None if factors is None else factors.reciprocal()
        return QuantizedLinear(codes, w_scale, shift, multiplier=multiplier)
    chosen = affine_scale(-2.0, 3.0, symmetric=False)
    by_channel = chosen.scale if factors is None else chosen.scale * factors
    return QuantizedLinear(
        codes, w_scale, shift, x_scale=chosen.scale, x_zero_point=chosen.zero_point,
        x_inverse_scale=by_channel.reciprocal(),
    )  # fmt: skip


def _expected(layer: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
    """The integer definition, in float64 where it is exact and float32 where it rounds."""
    k = x.shape[-1]
    rows = x.reshape(-1, k).float()
    if layer.is_static:
        codes = torch.round(rows * layer.x_inverse_scale) + layer.x_zero_point
        codes, scale = codes.clamp(0, 255) - layer.x_zero_point, layer.x_scale
    else:
        rows = rows if layer.multiplier is None else rows * layer.multiplier
        scale = (rows.abs().amax(-1, keepdim=True) / 127).clamp_min(TINY)
        codes = torch.round(rows * scale.reciprocal()).clamp(-128, 127)
    acc = (codes.double() @ layer.codes().double().t()).float()
    y = acc * scale * layer.w_scale
    y = y if layer.bias is None else y + layer.bias
    return y.reshape(*x.shape[:-1], layer.out_features).to(x.dtype)


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lead", [(), (1,), (7,), (2, 3), (2, 1, 3), (0,), (4, 0)])
def test_forward_is_the_integer_definition(
    static: bool, smooth: bool, dtype: torch.dtype, lead: tuple[int, ...]
) -> None:
    layer = _layer(33, 70, static=static, smooth=smooth)
    x = torch.randn(*lead, 70, generator=torch.Generator().manual_seed(1)).to(dtype)
    y = layer(x)
    assert y.dtype is dtype and y.shape == (*lead, 33)
    assert torch.equal(y, _expected(layer, x))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 129), (65, 3), (64, 64), (127, 255)])
@pytest.mark.parametrize("bias", [True, False])
def test_odd_and_tiny_dimensions(n: int, k: int, bias: bool) -> None:
    for static in (True, False):
        layer = _layer(n, k, static=static, bias=bias)
        x = torch.randn(5, k)
        assert torch.equal(layer(x), _expected(layer, x))
        assert (layer.bias is not None) == bias


def test_inputs_that_are_not_contiguous_or_all_zero() -> None:
    layer = _layer(40, 48, static=False)
    x = torch.randn(48, 6).t()
    assert torch.equal(layer(x), _expected(layer, x))
    assert torch.equal(layer(torch.zeros(3, 48)), layer.bias.expand(3, 40))


def test_weight_is_what_the_codes_stand_for() -> None:
    """Also where the layer itself applies a smoothing factor: x @ weight.T is the float result."""
    for static in (True, False):
        layer = _layer(40, 48, static=static, smooth=True)
        factors = layer.smoothing()
        expected = layer.codes().float() * layer.w_scale[:, None] / factors
        assert torch.equal(layer.weight, expected) and layer.weight.shape == (40, 48)
        x = torch.rand(16, 48)
        float_result = x @ layer.weight.t() + layer.bias
        # Half a step an element of x, k elements: 0.5 * step * sum_k |w|.
        step = float(layer.x_scale) if static else 1 / 127 / float(factors.min())
        bound = 0.5 * step * (layer.weight * factors).abs().sum(1) + 1e-4
        assert bool(((layer(x) - float_result).abs() <= bound).all())


def test_casting_moves_no_scale_and_keeps_what_is_shared() -> None:
    a, b = _layer(40, 48, static=True), _layer(40, 48, static=True)
    b.x_scale = a.x_scale
    x = torch.randn(3, 48)
    before = a(x.bfloat16())
    pair = torch.nn.ModuleList([a, b]).to(torch.bfloat16).half().bfloat16()
    assert pair[0].x_scale is pair[1].x_scale
    assert a.w_scale.dtype is torch.float32 and a.bias.dtype is torch.float32
    assert a.packed.dtype is torch.int8 and a.x_zero_point.dtype is torch.int32
    assert a.weight.dtype is torch.bfloat16
    assert torch.equal(a(x.bfloat16()), before)
    assert pair.to("meta")[0].w_scale.dtype is torch.float32


def test_survives_copying_and_its_own_state_dict() -> None:
    layer, x = _layer(40, 48, static=True, smooth=True), torch.randn(3, 48)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x))
    other = _layer(40, 48, static=True, smooth=True)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    assert not list(layer.parameters())


def test_describes_itself() -> None:
    text = repr(_layer(40, 48, static=True, smooth=True))
    assert "in_features=48, out_features=40, bias=True, static, smoothed here" in text
    assert "dynamic" in repr(_layer(40, 48, static=False))


# ---------------------------------------------------------------- the numbers themselves

_FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)


@given(st.lists(st.lists(_FLOATS, min_size=5, max_size=5), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_weight_error_is_at_most_half_a_step(rows: list[list[float]]) -> None:
    weight = torch.tensor(rows)
    codes, scale = quantize_weight(weight)
    assert codes.dtype is torch.int8 and int(codes.min()) >= -127
    assert bool(torch.isfinite(scale).all()) and bool((scale >= TINY).all())
    # The product with fl(1/scale) and the division by 127 round: 127 * 4 eps of a step more.
    error = (codes.double() * scale.double()[:, None] - weight.double()).abs()
    assert bool((error <= scale.double()[:, None] * (0.5 + 127 * 4 * 2**-24)).all())


@given(_FLOATS, _FLOATS, st.booleans())
@settings(max_examples=200, deadline=None)
def test_zero_has_a_code_and_the_range_is_covered(a: float, b: float, symmetric: bool) -> None:
    lo, hi = sorted((a, b))
    chosen = affine_scale(lo, hi, symmetric)
    scale, zero = chosen.scale.double(), int(chosen.zero_point)
    assert 0 <= zero <= 255 and float(scale) >= TINY
    x = torch.tensor([lo, 0.0, hi])
    codes = torch.ops.qinductor.quantize(x, chosen.scale.reciprocal(), chosen.zero_point)
    assert int(codes[1]) == zero
    # The ends of the range come back within a step: zero point and code each round by a half.
    assert bool((((codes.double() - zero) * scale - x.double()).abs() <= scale * 1.001).all())


def test_a_row_of_zeros_stays_zero() -> None:
    codes, scale = quantize_weight(torch.zeros(2, 3))
    assert not bool(codes.any()) and bool((scale.reciprocal() < float("inf")).all())
