"""The GELU table is derived again; its error is bounded over every fp16 input and a fp32 grid."""

from __future__ import annotations

import mpmath
import pytest
import torch

from qinductor.activations import (
    ACTIVATIONS,
    GELU_COEFFICIENTS,
    GELU_LIMIT,
    GELU_SEGMENTS_PER_UNIT,
    apply_activation,
    gelu,
)

SEGMENTS = 15  # and a sixteenth, which is constant
WIDTH = mpmath.mpf(3) / 8


def _interpolated(segment: int) -> list[float]:
    """Coefficients in f of Phi(t) - 1/2, t = (segment + f) * 3/8, through five Chebyshev nodes."""
    with mpmath.workdps(50):
        nodes = [(1 + mpmath.cos((2 * i + 1) * mpmath.pi / 10)) / 2 for i in range(5)]
        values = [mpmath.ncdf((segment + f) * WIDTH) - mpmath.mpf(1) / 2 for f in nodes]
        powers = mpmath.matrix([[f**power for power in range(5)] for f in nodes])
        return [float(c) for c in mpmath.lu_solve(powers, mpmath.matrix(values))]


def test_gelu_table_is_the_interpolation_rounded_to_float32() -> None:
    derived = [_interpolated(i) for i in range(SEGMENTS)] + [[0.5, 0.0, 0.0, 0.0, 0.0]]
    assert torch.equal(torch.tensor(derived), torch.tensor(GELU_COEFFICIENTS))
    assert float(1 / WIDTH) == GELU_SEGMENTS_PER_UNIT


def test_gelu_limit_stays_in_the_last_segment() -> None:
    limit = torch.tensor(GELU_LIMIT)
    assert int(limit * torch.tensor(GELU_SEGMENTS_PER_UNIT)) == len(GELU_COEFFICIENTS) - 1


def _exact_gelu(x: torch.Tensor) -> torch.Tensor:
    return x.double() * torch.special.ndtr(x.double())


def _assert_bound(x: torch.Tensor) -> None:
    """|error| <= max(1e-6, 2 ulp): the table's 4.7e-7, and two roundings of a result up to x."""
    exact = _exact_gelu(x)
    ulp = torch.exp2(torch.floor(torch.log2(exact.abs().clamp_min(2.0**-126))) - 23)
    error = (gelu(x).double() - exact).abs()
    assert (error <= torch.maximum(2 * ulp, torch.tensor(1e-6, dtype=torch.float64))).all()


def test_gelu_error_over_all_fp16_inputs() -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).float()
    _assert_bound(x[x.isfinite()])


def test_gelu_error_over_a_dense_float32_grid() -> None:
    near = torch.linspace(-8, 8, 1_000_001)
    edges = torch.arange(0, 17) * 0.375
    around = torch.cat([torch.nextafter(edges, edges + s) for s in (-1, 1)])
    _assert_bound(torch.cat([near, edges, around, -edges, -around]))


def test_gelu_of_special_values() -> None:
    inf = torch.inf
    out = gelu(torch.tensor([inf, torch.nan, -0.0, 0.0, 3e38, -3e38]))
    assert out[0] == inf and out[1].isnan()
    assert out[2] == 0 and out[3] == 0
    assert out[4] == torch.tensor(3e38) and out[5] == 0


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_every_activation_keeps_nan_and_shape(name: str) -> None:
    x = torch.randn(3, 5)
    x[1, 2] = torch.nan
    out = apply_activation(x, name)
    assert out.shape == x.shape and out.dtype is torch.float32
    assert torch.equal(out.isnan(), x.isnan())


def test_activations_agree_with_torch() -> None:
    x = torch.linspace(-6, 6, 1001)
    for name, function in {
        "relu": torch.relu,
        "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
        "silu": torch.nn.functional.silu,
        "tanh": torch.tanh,
    }.items():
        assert torch.equal(apply_activation(x, name), function(x)), name
