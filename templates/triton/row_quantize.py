# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Per-token quantization in one kernel: a row's producer, its maximum, its scale and its codes.

The counterpart of :func:`qinductor.ops.quantize_per_token`, bit for bit, on what the producer
returns. Inductor makes such kernels itself where a graph is compiled; this one needs no compiler.

This module imports Triton: import it where a kernel is wanted, not before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...activations import GELU_LIMIT, GELU_SEGMENTS_PER_UNIT

LIMIT = tl.constexpr(GELU_LIMIT)
PER_UNIT = tl.constexpr(GELU_SEGMENTS_PER_UNIT)


@triton.jit
def gelu(x, table):
    """:func:`qinductor.activations.gelu`. table: float32 (16, 5); x: float32."""
    magnitude = tl.abs(x)
    u = tl.minimum(magnitude, LIMIT, propagate_nan=tl.PropagateNan.ALL) * PER_UNIT
    segment = tl.where(u == u, u, 0.0).to(tl.int32)
    f = u - segment.to(tl.float32)
    row = table + segment * 5
    q = tl.load(row + 4)
    q = q * f + tl.load(row + 3)
    q = q * f + tl.load(row + 2)
    q = q * f + tl.load(row + 1)
    q = q * f + tl.load(row)
    return x * 0.5 + magnitude * q


@triton.jit
def quantize_row(t, inside, DIVISOR: tl.constexpr, MIN_SCALE: tl.constexpr):
    """Signed codes (float32 integers from -128 to 127, NaN for none) and scale of one row.

    A NaN in the row makes the scale NaN, as the eager operator does.
    """
    number = t == t
    magnitude = tl.where(inside & number, tl.abs(t), 0.0)
    nans = tl.sum(tl.where(inside & (t != t), 1, 0), 0)
    amax = tl.where(nans > 0, float("nan"), tl.max(magnitude, 0))
    scale = tl.div_rn(amax, tl.full((), DIVISOR, tl.float32))
    scale = tl.maximum(scale, MIN_SCALE, propagate_nan=tl.PropagateNan.ALL)
    inverse = tl.div_rn(tl.full((), 1.0, tl.float32), scale)
    limited = tl.minimum(t * inverse, 127.0, propagate_nan=tl.PropagateNan.ALL)
    limited = tl.maximum(limited, -128.0, propagate_nan=tl.PropagateNan.ALL)
    # Adding 1.5 * 2**23 leaves no bits behind the point: the addition rounds ties to even.
    return (limited + 12582912.0) - 12582912.0, scale


@triton.jit
def quantize_rows_kernel(
    x,
    multiplier,
    weight,
    bias,
    table,
    codes,
    scales,
    produced,
    K,
    EPS: tl.constexpr,
    DIVISOR: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    PRODUCER: tl.constexpr,
    HAS_MULTIPLIER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STORE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Codes (M, K) uint8 with zero point 128 and scales (M,) of producer(x (M, K)).

    One program a row. The producer computes in float32 and rounds to x's dtype, in which STORE
    writes it to ``produced`` as well: the residual branch of a post-norm layer reads it.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < K
    t = tl.load(x + row * K + k, mask=inside, other=0.0).to(tl.float32)
    if PRODUCER == "gelu":
        t = gelu(t, table)
    elif PRODUCER != "none":
        if PRODUCER == "layer_norm":
            t = tl.where(inside, t - tl.sum(t, 0) / K, 0.0)
        power = tl.div_rn(tl.sum(t * t, 0), tl.full((), 1.0, tl.float32) * K)
        t = t * tl.div_rn(tl.full((), 1.0, tl.float32), tl.sqrt_rn(power + EPS))
        t = t * tl.load(weight + k, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            t += tl.load(bias + k, mask=inside, other=0.0).to(tl.float32)
    if PRODUCER != "none":
        rounded = t.to(x.dtype.element_ty)
        t = rounded.to(tl.float32)
        if STORE:
            tl.store(produced + row * K + k, rounded, mask=inside)
    if HAS_MULTIPLIER:
        t *= tl.load(multiplier + k, mask=inside, other=0.0)
    signed, scale = quantize_row(t, inside, DIVISOR, MIN_SCALE)
    code = tl.where(signed == signed, signed + 128.0, 0.0)
    tl.store(codes + row * K + k, code.to(tl.int32).to(tl.uint8), mask=inside)
    tl.store(scales + row, scale)
