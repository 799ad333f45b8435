"""Checks of quantize()'s arguments, shared with encode()."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qinductor.errors import ConfigError

from .carrier import carrier_of
from .format_base import Format
from .named import NAMED
from .random_bits import Draw, RandomOptions, lane_width
from .reference import check_format
from .rounding import Rounding

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEVICES = ("cpu", "cuda", "meta")
BACKWARD = ("identity", "mask")


def checked_draw(
    x: Tensor,
    fmt: object,
    rounding: object,
    backward: str = "identity",
    **random: Unpack[RandomOptions],
) -> Draw:
    """Check all arguments of a quantizer; the random bits it reads, with a seed drawn if needed.

    Raises:
        ConfigError: see :func:`qinductor.numerics.quantize`.
    """
    if not isinstance(rounding, Rounding):
        names = ", ".join(f"Rounding.{m.name}" for m in Rounding)
        raise ConfigError(f"rounding={rounding!r} is not a rounding mode. Valid: {names}.")
    if not isinstance(fmt, Format):
        raise ConfigError(
            f"{fmt!r} is not a format. Valid: a FloatingPoint, FixedPoint, ... object or one of "
            f"{', '.join(NAMED)}."
        )
    carrier_of(x.dtype)
    check_format(fmt, rounding, x.dtype)
    if x.device.type not in DEVICES:
        raise ConfigError(
            f"quantize() runs on {', '.join(DEVICES)}, not on {x.device}. Move the tensor first."
        )
    if backward not in BACKWARD:
        raise ConfigError(f"backward={backward!r} is not valid. Valid: 'identity', 'mask'.")
    if rounding is not Rounding.STOCHASTIC:
        return Draw()
    random_bits, index_offset = random.get("random_bits", 32), random.get("index_offset", 0)
    lane_width(random_bits)
    if index_offset < 0:
        raise ConfigError(f"index_offset={index_offset} must not be negative.")
    site = random.get("site", 0)
    if not 0 <= site < 2**32:
        raise ConfigError(f"site={site} must be a 32-bit unsigned integer; see site_hash().")
    seed = random.get("seed")
    if seed is None:
        seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=x.device)
    step = random.get("step", 0)
    return Draw(
        *(_scalar("seed", seed, x.device), _scalar("step", step, x.device)),
        *(site, random_bits, index_offset),
    )


def _scalar(name: str, value: int | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        if value.dtype != torch.int64 or value.dim():
            raise ConfigError(
                f"{name} must be an int or a 0-d int64 tensor, not a {value.dim()}-d "
                f"{value.dtype} tensor."
            )
        return value if value.device == device else value.to(device)
    # Unsigned 64-bit seeds are kept bit for bit.
    signed = value - 2**64 if value >= 2**63 else value
    if not -(2**63) <= signed < 2**63:
        raise ConfigError(f"{name}={value} must fit 64 bits.")
    return torch.full((), signed, dtype=torch.int64, device=device)


def check_out(x: Tensor, out: Tensor) -> None:
    """Raise ConfigError unless ``out`` can hold x quantized."""
    if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
        raise ConfigError(
            f"out must be a {tuple(x.shape)} {x.dtype} tensor on {x.device}, not "
            f"{tuple(out.shape)} {out.dtype} on {out.device}."
        )
