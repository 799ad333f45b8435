"""Where random bits come from: Philox4x32-10, a function of (seed, site, step, element index).

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC11), and the
Random123 library's test vectors. The mapping from elements to words is this project's: with i the
row-major index in the tensor's shape plus ``index_offset``, b the smallest of 8, 16 and 32 that
holds r bits, and n = 128/b:

    i = 16·n·g + 16·w + l   →   counter (block low, block high, site, step), block = 16·g + l

takes the w-th b-bit piece of the four words (low bits first), and of it the top r bits.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from qinductor.errors import ConfigError

PHILOX_M = (0xD2511F53, 0xCD9E8D57)
PHILOX_W = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
LANES = 16
"""Blocks that are worked side by side: one 512-bit register of 32-bit words."""

_LOW = 0xFFFFFFFF


class RandomOptions(TypedDict, total=False):
    """Arguments of stochastic quantizers; :func:`qinductor.numerics.quantize` says what they do."""

    seed: int | Tensor | None
    site: int
    step: int | Tensor
    random_bits: int
    index_offset: int


class Draw(NamedTuple):
    """Which random bits a stochastic quantizer reads: checked, seed and step as 0-d int64."""

    seed: Tensor | None = None
    step: Tensor | None = None
    site: int = 0
    random_bits: int = 32
    index_offset: int = 0

    def options(self) -> RandomOptions:
        """The same as arguments of quantize()."""
        step = 0 if self.step is None else self.step
        return {**self._asdict(), "step": step}  # type: ignore[typeddict-item]


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox. All tensors int64, holding 32-bit words; they broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for i in range(ROUNDS):
        if i:
            k0, k1 = (k0 + PHILOX_W[0]) & _LOW, (k1 + PHILOX_W[1]) & _LOW
        # The product's 64 bits wrap to a negative int64; its halves are still right.
        p0, p1 = c0 * PHILOX_M[0], c2 * PHILOX_M[1]
        hi0, lo0 = (p0 >> 32) & _LOW, p0 & _LOW
        hi1, lo1 = (p1 >> 32) & _LOW, p1 & _LOW
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
    return c0, c1, c2, c3


def lane_width(random_bits: int) -> int:
    """b: bits of a block spent on an element.

    Raises:
        ConfigError: random_bits is not 1 to 32.
    """
    if not isinstance(random_bits, int) or not 1 <= random_bits <= 32:
        raise ConfigError(f"random_bits={random_bits!r} must be an integer from 1 to 32.")
    return 8 if random_bits <= 8 else 16 if random_bits <= 16 else 32


def random_integers(
    count: int,
    random_bits: int,
    seed: Tensor,
    step: Tensor,
    *,
    site: int = 0,
    index_offset: int = 0,
) -> Tensor:
    """The r-bit random integers u of ``count`` elements from ``index_offset`` on.

    ``seed`` and ``step`` are 0-d int64 tensors, ``site`` has 32 bits.

    Returns:
        (count,) int64 on the seed's device, each in [0, 2^random_bits).
    """
    b = lane_width(random_bits)
    per_block = 128 // b
    group = LANES * per_block
    first = index_offset // group
    groups = -(-(index_offset + count) // group) - first
    device = seed.device
    block = torch.arange(groups * LANES, dtype=torch.int64, device=device) + first * LANES
    site_word = torch.full((), site & _LOW, dtype=torch.int64, device=device)
    words = philox4x32(
        (block & _LOW, (block >> 32) & _LOW, site_word, step & _LOW),
        (seed & _LOW, (seed >> 32) & _LOW),
    )
    stacked = torch.stack([w.expand_as(block) for w in words], 1)
    shifts = torch.arange(0, 32, b, dtype=torch.int64, device=device)
    pieces = (stacked[:, :, None] >> shifts) & ((1 << b) - 1)
    ordered = pieces.reshape(groups, LANES, per_block).transpose(1, 2).reshape(-1)
    start = index_offset - first * group
    return ordered[start : start + count] >> (b - random_bits)


def site_hash(path: str, op: str = "", role: str = "", call: int = 0, rank: int = 0) -> int:
    """32-bit site of a quantizer: module path, op, role and call number (SHA-256, truncated).

    ``rank``: the data-parallel rank, for activations and gradients, whose elements differ between
    ranks. Weights and optimizer state are replicated and must round alike: leave it 0 there.
    """
    text = "\0".join((path, op, role, str(call), *([str(rank)] if rank else [])))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
