"""The random bits of stochastic rounding in Triton kernels: the mapping of ``random_bits``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def random_bits(seed, step, site, index, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Left-aligned random bits u·2^(32−r) of elements: int32 of index's shape.

    Bit for bit those of :func:`qinductor.numerics.random_bits.random_integers`. Each element
    computes its Philox block, of which it takes ``BITS`` rounded up to 8, 16 or 32.

    Args:
        seed: scalar int64.
        step: scalar integer, of which 32 bits are used.
        site: scalar integer below 2^32.
        index: row-major index of each element in the whole tensor, any integer tensor.
        BITS: r, 1 to 32.
    """
    LANE: tl.constexpr = 8 if BITS <= 8 else (16 if BITS <= 16 else 32)
    # 16 blocks side by side make a group; 128 // LANE elements share a block.
    GROUP: tl.constexpr = 16 * (128 // LANE)
    i = index.to(tl.int64)
    in_group = (i & (GROUP - 1)).to(tl.int32)
    block = (i // GROUP) * 16 + (in_group & 15)
    low = block.to(tl.uint32)
    high = (block >> 32).to(tl.uint32)
    site_word = low * 0 + tl.to_tensor(site).to(tl.int64).to(tl.uint32)
    step_word = low * 0 + tl.to_tensor(step).to(tl.int64).to(tl.uint32)
    key = tl.to_tensor(seed).to(tl.int64)
    w0, w1, w2, w3 = tl.philox(key, low, high, site_word, step_word)
    first = (in_group >> 4) * LANE
    number = first >> 5
    word = tl.where(number < 2, tl.where(number == 0, w0, w1), tl.where(number == 2, w2, w3))
    piece = (word >> (first & 31).to(tl.uint32)) << (32 - LANE)
    KEEP: tl.constexpr = (0xFFFFFFFF << (32 - BITS)) & 0xFFFFFFFF
    return (piece & KEEP).to(tl.int32, bitcast=True)
