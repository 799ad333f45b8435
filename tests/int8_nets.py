"""Int8 layers for tests: random codes, the extremes among them, and outputs near 1."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qinductor.smoothquant.linear import QuantizedLinear


def weight_codes(n: int, k: int, *, seed: int = 0) -> Tensor:
    """int8 (N, K) over the whole range; row 0 is all -128, and the last row all 127."""
    codes = torch.randint(-128, 128, (n, k), generator=torch.Generator().manual_seed(seed))
    codes[0], codes[-1] = -128, 127
    return codes.to(torch.int8)


def int8_linear(
    n: int,
    k: int,
    *,
    bias: bool = True,
    dynamic: bool = False,
    seed: int = 0,
    static: dict[str, Tensor] | None = None,
) -> QuantizedLinear:
    """A QuantizedLinear (K → N). ``static`` are shared scales of a group, from :func:`scales`."""
    generator = torch.Generator().manual_seed(seed + 1)
    w_scale = (torch.rand(n, generator=generator) + 0.5) / (60 * k**0.5)
    b = torch.randn(n, generator=generator) if bias else None
    given = {} if dynamic else static if static is not None else scales()
    return QuantizedLinear(weight_codes(n, k, seed=seed), w_scale, b, **given)


def scales(scale: float = 0.03, zero_point: int = 119) -> dict[str, Tensor]:
    """Scales of a static activation."""
    x_scale = torch.tensor(scale)
    return {
        "x_scale": x_scale,
        "x_inverse_scale": x_scale.reciprocal(),
        "x_zero_point": torch.tensor(zero_point, dtype=torch.int32),
    }


class Feedforward(nn.Module):
    """x + down(relu(up(x))), the shape of every transformer's second half."""

    def __init__(self, width: int = 64, inner: int = 130, *, dynamic: bool = False, seed: int = 0):
        super().__init__()
        self.up = int8_linear(inner, width, dynamic=dynamic, seed=seed)
        self.down = int8_linear(width, inner, dynamic=dynamic, seed=seed + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))) + x


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Equal bit for bit, the sign of zero included; NaNs are equal whatever their payload."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if not got.dtype.is_floating_point:
        return torch.equal(got, want)
    ints = {8: torch.int64, 4: torch.int32, 2: torch.int16}[got.dtype.itemsize]
    nan = want.isnan()
    return torch.equal(got.isnan(), nan) and torch.equal(
        got.view(ints).masked_fill(nan, 0), want.view(ints).masked_fill(nan, 0)
    )
