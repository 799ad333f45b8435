"""Activations of an int8 linear's epilogue: their one definition, in float32.

GELU (erf) is *defined* here as a piecewise polynomial, so that eager code and every template agree
bit for bit. With Q(t) = Phi(t) - 1/2, Phi the normal distribution function,

    gelu(x) = x * Phi(x) = x / 2 + |x| * Q(|x|),

and Q is a polynomial of degree 4 in the fraction f of u = |x| * 8/3 on each of 16 segments. The
coefficients interpolate Q at the Chebyshev nodes of a segment, rounded to float32; the last segment
is the constant 1/2, so that large inputs pass through exactly. Largest error against float64:
4.7e-7 absolute (``tests/test_activations.py`` derives the coefficients and the bound again).
Multiplications and additions round separately: no fused multiply-add.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

GELU_SEGMENTS_PER_UNIT = 8 / 3
"""Reciprocal of a segment's width."""
GELU_LIMIT = 5.9999995
"""Largest |x| that is looked up; float32 below 6, so that the last segment's index is 15."""

# Row i: coefficients of f**0 … f**4 on segment i.
# fmt: off
GELU_COEFFICIENTS: tuple[tuple[float, float, float, float, float], ...] = (
    (1.3484818e-07, 0.1495966, 5.423038e-05, -0.0036595913, 0.00017825911),
    (0.14616983, 0.13944276, -0.009780832, -0.0028799921, 0.00042085128),
    (0.27337262, 0.112928495, -0.015895383, -0.0011193749, 0.00041918788),
    (0.3697054, 0.07945811, -0.016794575, 0.0005912659, 0.0002326944),
    (0.43319273, 0.048572715, -0.013689239, 0.0015061079, 2.1392909e-05),
    (0.4696036, 0.025796315, -0.009080498, 0.0015563432, -0.00010021982),
    (0.48777553, 0.011902148, -0.0050197053, 0.0011298476, -0.000120278004),
    (0.49566758, 0.0047707492, -0.0023419799, 0.0006406716, -8.692349e-05),
    (0.4986501, 0.0016612416, -0.00092919247, 0.0002955614, -4.681799e-05),
    (0.49963093, 0.00050252274, -0.00031503855, 0.00011321931, -2.0057283e-05),
    (0.49991158, 0.00013205282, -9.15811e-05, 3.6442034e-05, -7.0394863e-06),
    (0.49998146, 3.014404e-05, -2.2880668e-05, 9.9308e-06, -2.0572338e-06),
    (0.4999966, 5.9773756e-06, -4.92176e-06, 2.3031002e-06, -5.056757e-07),
    (0.49999946, 1.0296015e-06, -9.1274165e-07, 4.5624836e-07, -1.0525224e-07),
    (0.4999999, 1.5405371e-07, -1.4608645e-07, 7.7419706e-08, -1.8639344e-08),
    (0.5, 0.0, 0.0, 0.0, 0.0),
)
# fmt: on


def gelu(x: Tensor) -> Tensor:
    """X * Phi(x) by the module's polynomial. x: float32, any shape. NaN gives NaN."""
    table = torch.tensor(GELU_COEFFICIENTS, dtype=torch.float32, device=x.device)
    magnitude = x.abs()
    u = magnitude.clamp_max(GELU_LIMIT) * GELU_SEGMENTS_PER_UNIT
    segment = torch.nan_to_num(u).to(torch.int32)
    f = u - segment.to(torch.float32)
    row = table[segment.long()]
    q = row[..., 4]
    for power in (3, 2, 1, 0):
        q = q * f + row[..., power]
    return x * 0.5 + magnitude * q


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh form of GELU: x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))."""
    return torch.nn.functional.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
}
"""Name → definition. ``none``, ``relu`` and ``gelu`` are bit-equal in every template; the others
use the vector library's tanh and exp, within 4 ulp of these definitions."""


def apply_activation(x: Tensor, name: str) -> Tensor:
    """Apply the activation called ``name`` to a float32 tensor."""
    return ACTIVATIONS[name](x)
