"""Tiles of the GEMM: which sizes are valid, and which one a problem gets.

No figure here was measured: no GPU was at hand. The sizes follow from what the instructions take
and from shared memory; ``max_autotune`` times :func:`candidates` on the machine itself.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import dataclass

from ...capability import Gpu
from ...errors import ConfigError

MIN_K_A_SPLIT = 256
"""Fewest k that one split sums: below, writing and adding the partial sums costs more."""
MAX_SPLITS = 16
ALIGNMENT = 16
"""Bytes of the widest load. Rows of other lengths are read byte by byte, and the addresses of a
large tile's bytes alone fill the registers."""


class Epilogue(enum.Enum):
    """What a block does with its sums, by the registers it takes beside them.

    A thread has 255 registers. Compiled for sm_80, sm_90 and sm_100, an epilogue of scales, bias,
    ReLU and requantization spills with 64 sums a thread (168 to 384 bytes) and not with 32. GELU's
    polynomial spills neither, but with eight warps the assembler needs up to 100 s for it.
    """

    NONE = "none"
    LIGHT = "light"
    HEAVY = "heavy"


@dataclass(frozen=True)
class Tile:
    """What one block computes, and how.

    Attributes:
        m, n, k: sizes of a block's tile, powers of two.
        warps: groups of 32 threads of a block.
        stages: tiles in flight between global and shared memory.
        splits: parts of K that different blocks sum.
        group: rows of tiles that run side by side, to meet in the L2 cache.

    Raises:
        ConfigError: a size that no kernel can have; the message names the valid ones.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    splits: int = 1
    group: int = 8

    def __post_init__(self) -> None:
        # The least sizes are those of the 8-bit instruction, m16n8k32, with room for a swizzle.
        for name, least, most in (
            ("m", 16, 256), ("n", 16, 256), ("k", 32, 512), ("warps", 1, 16)
        ):  # fmt: skip
            value = getattr(self, name)
            if not least <= value <= most or value & (value - 1):
                raise ConfigError(
                    f"tile {name}={value} is not valid. Valid: powers of two from {least} to "
                    f"{most}."
                )
        for name, most in (("stages", 8), ("splits", 128), ("group", 64)):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise ConfigError(f"tile {name}={value} is not valid. Valid: 1 to {most}.")

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the tiles in flight, one byte an element."""
        return self.stages * (self.m + self.n) * self.k

    def check(self, gpu: Gpu) -> Tile:
        """Return the tile itself.

        Raises:
            ConfigError: it needs more shared memory than a block may have on ``gpu``.
        """
        if self.shared_bytes > gpu.shared_bytes:
            raise ConfigError(
                f"tile {self.m}x{self.n}x{self.k} in {self.stages} stages needs "
                f"{self.shared_bytes} bytes of shared memory, {gpu.target} has "
                f"{gpu.shared_bytes}. Use fewer stages or a smaller tile."
            )
        return self

    def split_size(self, k: int) -> int:
        """How many k one split sums: a multiple of the tile's."""
        return -(-k // (self.splits * self.k)) * self.k


_SMALL = Tile(16, 64, 128, warps=4, stages=5)
_MEDIUM = Tile(64, 64, 64, warps=4, stages=4)
_WIDE = Tile(64, 128, 128, warps=8, stages=3)
_UNALIGNED = Tile(64, 64, 32, warps=8, stages=2)
_LARGE = Tile(128, 128, 64, warps=8, stages=4)
# More warps or more columns than these, and the assembler spills registers: docs/gpu.md.
_LARGEST = {
    ("s8", 8): Tile(128, 128, 128, warps=8, stages=3),
    ("s8", 9): Tile(128, 256, 128, warps=8, stages=3),
    # Triton before 3.9 has no int8 tcgen05: the sums are in registers there.
    ("s8", 10): Tile(128, 128, 128, warps=8, stages=3),
    ("fp8", 8): Tile(128, 128, 128, warps=8, stages=3),
    ("fp8", 9): Tile(128, 128, 128, warps=4, stages=4),
    ("fp8", 10): Tile(128, 128, 128, warps=4, stages=4),
}
"""By operands and major compute capability (10 stands for all later ones)."""


def choose_tile(
    m: int,
    n: int,
    k: int,
    gpu: Gpu,
    operands: str = "s8",
    epilogue: Epilogue = Epilogue.NONE,
) -> Tile:
    """Tile for (M, K) times (N, K) transposed; m is a hint, the kernel takes any.

    Args:
        m: rows of the activation, as far as known.
        n: columns of the product.
        k: length of its sums.
        gpu: where it runs.
        operands: ``s8`` or ``fp8``.
        epilogue: what is fused into it.
    """
    if k % ALIGNMENT:
        tile = _UNALIGNED
    elif m <= 16:
        tile = _SMALL
    else:
        tile = next(t for t in _large(gpu, operands, epilogue) if _fills(t, m, n, gpu))
    # Partial sums of fp8 products are rounded: added in another order they would differ.
    if operands == "s8" and _blocks(tile, m, n) < gpu.processors:
        wanted = min(gpu.processors // _blocks(tile, m, n), k // MIN_K_A_SPLIT, MAX_SPLITS)
        tile = dataclasses.replace(tile, splits=max(1, wanted))
        # Rounding a split up to whole tiles can leave the last ones nothing to do.
        tile = dataclasses.replace(tile, splits=max(1, -(-k // tile.split_size(k))))
    return tile.check(gpu)


def candidates(
    m: int,
    n: int,
    k: int,
    gpu: Gpu,
    operands: str = "s8",
    epilogue: Epilogue = Epilogue.NONE,
) -> Iterator[Tile]:
    """Tiles worth timing, the chosen one first; all have its splits, so outputs of one shape."""
    first = choose_tile(m, n, k, gpu, operands, epilogue)
    yield first
    if k % ALIGNMENT:
        return
    # Timing decides here: a larger tile may pay in spite of an epilogue that spills.
    for tile in (_SMALL, _WIDE, *_large(gpu, operands, Epilogue.NONE)):
        for stages in {tile.stages, max(2, tile.stages - 1)}:
            other = dataclasses.replace(tile, stages=stages, splits=first.splits)
            if other != first and other.shared_bytes <= gpu.shared_bytes:
                yield other


def _largest(gpu: Gpu, operands: str) -> Tile:
    tile = _LARGEST[operands, min(gpu.sm[0], 10)]
    return tile if tile.shared_bytes <= gpu.shared_bytes else _LARGE


def _large(gpu: Gpu, operands: str, epilogue: Epilogue) -> tuple[Tile, ...]:
    """Tiles for many rows, the largest first."""
    if epilogue is Epilogue.HEAVY:
        return (_MEDIUM,)
    if epilogue is Epilogue.LIGHT:
        return (_WIDE, _MEDIUM)
    return (_largest(gpu, operands), _LARGE, _MEDIUM)


def _blocks(tile: Tile, m: int, n: int) -> int:
    return -(-m // tile.m) * -(-n // tile.n)


def _fills(tile: Tile, m: int, n: int, gpu: Gpu) -> bool:
    """True if the problem has a block for most processors, or no smaller tile is left."""
    fits = m > tile.m // 2 and _blocks(tile, m, n) * 4 >= gpu.processors * 3
    return tile is _MEDIUM or fits
