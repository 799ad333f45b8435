"""Nearest rounding: qtorch 0.3.0's bits, but for the classes of its defects, each with a value."""

from __future__ import annotations

import json

import pytest
import recording
import torch

from qinductor.numerics import Rounding, quantize
from qinductor.numerics.reference import reference_quantize
from qinductor.qtorch import BlockFloatingPoint, FixedPoint, FloatingPoint
from qinductor.qtorch.quant import (
    block_quantize,
    fixed_point_quantize,
    float_quantize,
    quantizer,
)

INF, NAN = float("inf"), float("nan")
RECORD = json.loads(recording.RECORD.read_text())


@pytest.mark.parametrize("number", recording.SETTINGS, ids=repr)
def test_a_million_recorded_results(number):
    x = recording.inputs(number)
    assert x.isfinite().all()
    kept = x.clone()
    bits = recording.results(quantize(x, number))
    assert torch.equal(x, kept)
    shown = RECORD[repr(number)]["shown"]
    for k, b in enumerate(bits[recording.SHOWN].tolist()):
        want = shown[8 * k : 8 * k + 8]
        assert f"{b & 0xFFFFFFFF:08x}" == want, x.flatten()[recording.SHOWN][k].item()
    assert recording.digest(bits) == RECORD[repr(number)]["sha256"]
    part = x.flatten()[:20_000] if x.dim() == 1 else x
    plain = reference_quantize(part, number, Rounding.TIES_TO_EVEN)
    assert torch.equal(recording.results(plain), bits[: part.numel()]), "the aten form"


@pytest.mark.parametrize("number", recording.SETTINGS, ids=repr)
def test_a_million_results_of_qtorch_itself(number):
    pytest.importorskip("qtorch.quant")
    x = recording.inputs(number)
    want, got = recording.theirs(x, number), quantize(x, number)
    assert torch.equal(recording.results(got), recording.results(want))


def test_the_record_is_of_all_settings():
    assert list(RECORD) == [repr(n) for n in recording.SETTINGS] and len(RECORD) == 30


def fixed(values, wl, fl, clamp=True, symmetric=False):
    x = torch.tensor(values)
    return fixed_point_quantize(x, wl, fl, clamp, symmetric, "nearest").tolist()


def floats(values, exp, man):
    return float_quantize(torch.tensor(values), exp, man, "nearest").tolist()


def signs(values):
    return torch.signbit(torch.tensor(values)).tolist()


# The table of qtorch 0.3.0's defects: what it returns, and what is right.


def test_float_with_all_mantissa_bits_is_the_identity():
    assert floats([3.0, -1.1, 1e-40], 8, 23) == torch.tensor([3.0, -1.1, 1e-40]).tolist()


def test_float_nan_stays_and_infinity_saturates():
    q = float_quantize(torch.tensor([NAN, INF, -INF]), 4, 3, "nearest")
    assert q[0].isnan() and q[1:].tolist() == [480, -480]


def test_float_negative_zero_keeps_its_sign():
    q = floats([-0.0, -1e-9, 0.0], 4, 3)
    assert q == [0, 0, 0] and signs(q) == [True, True, False]


def test_float_with_eight_exponent_bits_saturates_too():
    largest = (2 - 2.0**-7) * 2.0**127
    assert floats([3.4e38, -3.4e38, INF], 8, 7) == [largest, -largest, largest]


def test_fixed_large_values_stay():
    assert fixed([8388609.0], 32, 0) == [8388609]
    assert fixed([524288.0625], 32, 4) == [524288.0625]
    assert fixed([1e30, INF], 8, 4, clamp=False) == [torch.tensor(1e30).item(), INF]


def test_fixed_saturates_inside_its_range():
    assert fixed([3e9, -3e9], 32, 0) == [2147483520, -2147483648]


def test_fixed_zeros_are_positive():
    for clamp in (True, False):
        q = fixed([-0.0, -0.3, -0.49], 8, 0, clamp)
        assert q == [0, 0, 0] and signs(q) == [False] * 3


def test_fixed_stochastic_never_moves_a_grid_point():
    x = 2.0**22 - torch.arange(1000.0)
    assert torch.equal(fixed_point_quantize(x, 24, 0), x)


def test_block_of_the_largest_values():
    x = torch.tensor([2.0**126, 8.5e37, -1.0])
    assert block_quantize(x, 8, rounding="nearest")[0] == 2.0**126
    exact = quantize(x, BlockFloatingPoint(8).plain)
    assert torch.equal(block_quantize(x, 8, rounding="nearest"), exact)
    mixed = torch.stack([x, torch.tensor([1.99, -0.125, 0.125])])
    assert block_quantize(mixed, 4, 0, "nearest")[1].tolist() == [1.75, 0, 0.25]


def test_block_of_wide_words_is_the_block_rule():
    x = torch.randn(500)
    for wl in (23, 24, 30):
        q = block_quantize(x, wl, rounding="nearest")
        assert torch.equal(q, quantize(x, BlockFloatingPoint(wl).plain))
    assert block_quantize(torch.tensor([1.0]), 23, rounding="nearest").item() == 1


def test_block_of_one_bit_is_refused():
    with pytest.raises(ValueError, match=r"wl=1.*wl >= 2"):
        block_quantize(torch.ones(3), 1)


def test_block_with_non_finite_elements():
    q = block_quantize(torch.tensor([1.5, INF, -INF, NAN, 0.3]), 4, rounding="nearest")
    assert q[:3].tolist() == [1.5, 1.75, -1.75] and q[3].isnan() and q[4] == 0.25


def test_stochastic_rounding_obeys_the_seed():
    x = torch.rand(1000)
    for number in (FixedPoint(8, 4), FloatingPoint(4, 3), BlockFloatingPoint(8)):
        q = quantizer(number)
        torch.manual_seed(3)
        first = [q(x), q(x)]
        torch.manual_seed(3)
        again = [q(x), q(x)]
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
        assert not torch.equal(first[0], first[1])


# What makes nearest rounding there differ from an exact rule.


def test_its_own_roundings_are_kept():
    assert fixed([0.5 + 2.0**-24, -0.5 - 2.0**-24], 8, 0) == [0, -1]
    below_tie = torch.tensor([2.0**-10 - 2.0**-31])
    assert float_quantize(below_tie, 4, 3, "nearest").item() == 2.0**-9
    exact = quantize(below_tie, FloatingPoint(4, 3).plain, Rounding.TIES_TO_AWAY)
    assert exact.item() == 0
    assert block_quantize(torch.tensor([1.99, 0.125, -0.125]), 4, rounding="nearest").tolist() == [
        *(1.75, 0.25, 0.0)
    ]
