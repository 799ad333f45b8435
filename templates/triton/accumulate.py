# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""A matrix product with a simulated accumulator: every product and every sum is rounded.

    acc = Q_acc(acc + Q_prod(a[m, k] * b[n, k]))     k ascending, each exact and rounded once
    out = Q_outer(out + acc), acc = 0                after every CHUNK terms, where there are chunks

Exact means that the rounding sees the real number. float64 holds every product of float32 values.
A sum of two float64 numbers may not fit; it is rounded to odd, and a number of 53 bits that was
rounded to odd rounds to 51 bits or fewer as the real number would (Boldo and Melquiond, IEEE
Transactions on Computers 57, 2008).

This module imports Triton: import it where a kernel is wanted, not before.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_to_odd(a, b):
    """The sum of two float64 tensors, rounded to odd."""
    total = a + b
    # Knuth's error-free transformation: total + error is the sum, where nothing overflows.
    part = total - a
    error = (a - (total - part)) + (b - part)
    bits = total.to(tl.int64, bitcast=True)
    away = (error > 0) == (total > 0)
    odd = tl.where(away, bits + 1, bits - 1).to(tl.float64, bitcast=True)
    # A comparison with NaN is false, so infinities and NaNs stay.
    inexact = (error < 0) | (error > 0)
    return tl.where(inexact & ((bits & 1) == 0), odd, total)


@triton.jit
def round_to(
    x,
    FLOATING: tl.constexpr,
    PLACES: tl.constexpr,
    EMIN: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    OVERFLOW: tl.constexpr,
    MODE: tl.constexpr,
):
    """Round x (float64) to a format; float64.

    FLOATING: PLACES mantissa bits, smallest normal exponent EMIN; else PLACES bits behind the
    point. LOW, HIGH: the extreme values. OVERFLOW: ``saturate``, ``inf`` or ``nan``. MODE:
    ``even``, ``away`` or ``zero``.
    """
    bits = x.to(tl.int64, bitcast=True)
    if FLOATING:
        exponent = tl.maximum(((bits >> 52) & 0x7FF) - 1023, EMIN) - PLACES
    else:
        exponent = tl.zeros_like(bits) - PLACES
    # Powers of two, written as bits: both multiplications are exact.
    scale = ((1023 - exponent) << 52).to(tl.float64, bitcast=True)
    step = ((1023 + exponent) << 52).to(tl.float64, bitcast=True)
    far = tl.full((), 2251799813685248.0, tl.float64)
    steps = tl.minimum(tl.abs(x) * scale, far)
    whole = steps.to(tl.int64)
    fraction = steps - whole.to(tl.float64)
    if MODE == "even":
        up = (fraction > 0.5) | ((fraction == 0.5) & ((whole & 1) == 1))
    elif MODE == "away":
        up = fraction >= 0.5
    else:
        up = fraction < 0
    magnitude = tl.where(up, whole + 1, whole).to(tl.float64) * step
    high = tl.full((), HIGH, tl.float64)
    low = tl.full((), LOW, tl.float64)
    negative = bits < 0
    limit = tl.where(negative, -low, high)
    infinite = tl.abs(x) == float("inf")
    beyond = (magnitude > limit) | infinite
    if OVERFLOW == "saturate":
        reached = limit
    elif OVERFLOW == "inf":
        reached = tl.zeros_like(limit) + float("inf")
    else:
        reached = tl.zeros_like(limit) + float("nan")
    if MODE == "zero" and OVERFLOW != "saturate":
        reached = tl.where(infinite, reached, limit)
    magnitude = tl.where(beyond, reached, magnitude)
    signed = tl.where(negative, -magnitude, magnitude)
    if not FLOATING:  # such formats have one zero
        signed += 0.0
    return tl.where(x == x, signed, x)


@triton.jit
def accumulate_kernel(
    a,
    b,
    out,
    M,
    N,
    K,
    stride_a,
    stride_b,
    CHUNK: tl.constexpr,
    PROD: tl.constexpr,
    PROD_FLOATING: tl.constexpr,
    PROD_PLACES: tl.constexpr,
    PROD_EMIN: tl.constexpr,
    PROD_LOW: tl.constexpr,
    PROD_HIGH: tl.constexpr,
    PROD_OVERFLOW: tl.constexpr,
    ACC_FLOATING: tl.constexpr,
    ACC_PLACES: tl.constexpr,
    ACC_EMIN: tl.constexpr,
    ACC_LOW: tl.constexpr,
    ACC_HIGH: tl.constexpr,
    ACC_OVERFLOW: tl.constexpr,
    OUTER_FLOATING: tl.constexpr,
    OUTER_PLACES: tl.constexpr,
    OUTER_EMIN: tl.constexpr,
    OUTER_LOW: tl.constexpr,
    OUTER_HIGH: tl.constexpr,
    OUTER_OVERFLOW: tl.constexpr,
    MODE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Out (M, N) float32 of a (M, K) and b (N, K); grid (blocks of M, blocks of N).

    CHUNK 0: one accumulator and no outer one. PROD: products are rounded too.
    """
    rm = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    rn = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    a_column = a + rm * stride_a
    b_column = b + rn * stride_b
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float64)
    length = CHUNK if CHUNK > 0 else K
    for begin in range(0, K, length):
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float64)
        for k in range(begin, tl.minimum(K, begin + length)):
            x = tl.load(a_column + k, mask=rm < M, other=0.0).to(tl.float64)
            w = tl.load(b_column + k, mask=rn < N, other=0.0).to(tl.float64)
            term = x[:, None] * w[None, :]
            if PROD:
                term = round_to(
                    term, PROD_FLOATING, PROD_PLACES, PROD_EMIN, PROD_LOW, PROD_HIGH,
                    PROD_OVERFLOW, MODE,
                )  # fmt: skip
            acc = round_to(
                add_to_odd(acc, term), ACC_FLOATING, ACC_PLACES, ACC_EMIN, ACC_LOW, ACC_HIGH,
                ACC_OVERFLOW, MODE,
            )  # fmt: skip
        if CHUNK > 0:
            total = round_to(
                add_to_odd(total, acc), OUTER_FLOATING, OUTER_PLACES, OUTER_EMIN, OUTER_LOW,
                OUTER_HIGH, OUTER_OVERFLOW, MODE,
            )  # fmt: skip
        else:
            total = acc
    mask = (rm[:, None] < M) & (rn[None, :] < N)
    tl.store(out + rm[:, None] * N + rn[None, :], total.to(tl.float32), mask=mask)
