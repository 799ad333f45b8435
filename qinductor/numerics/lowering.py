"""Inductor's lowering of the quantizer: loops of integer operations, so that it fuses.

Registered by the operator's fake, hence also for stock Inductor. An element format is one
pointwise; formats whose blocks share a power of two are a maximum and a pointwise.
``why_not_fused`` says which formats stay calls of the operator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
from torch._inductor.virtualized import V, ops

from .blocks import Blocks, blocks_of
from .carrier import CARRIERS, Carrier, Word, carrier_of
from .elements import Block, Element, block_bits, element_bits
from .fast_paths import Fast, fast_path, largest_kept
from .format_base import Format
from .formats import FixedPoint, FloatingPoint
from .grids import grid_of
from .inductor_lanes import InductorExpression, InductorLanes, widened
from .named import BF16, FP16, parse_format
from .random_op import random_bits_op
from .rounding import Grid, Lane, Rounding, finished, quantize_bits

Loader = Callable[[Sequence[Any]], Any]


def why_not_fused(fmt: Format) -> str | None:
    """Why a quantizer to this format stays a call of the operator; None where it fuses.

    Blocks that do not divide their axis stay calls too.
    """
    if isinstance(fmt, Element | Block):
        return None
    return "its scale or grid is no power of two"


def _bits(value: Any, carrier: Carrier) -> Lane:
    """Bits of a loaded value of the carrier's dtype."""
    word = carrier.word
    real = ops.to_dtype(value, word.float_dtype, src_dtype=carrier.dtype)
    bits: Lane = InductorExpression(
        ops.to_dtype_bitcast(real, word.int_dtype, word.float_dtype), word.int_dtype
    )
    own = {torch.bfloat16: BF16, torch.float16: FP16}.get(carrier.dtype)
    if own is None:
        return bits
    # A fused producer hands its fp32 value on; eager would have rounded it to the dtype.
    nearest = Rounding.TIES_TO_EVEN
    grid = grid_of(own, CARRIERS[torch.float32], nearest)
    return quantize_bits(InductorLanes(word), bits, grid, nearest, word)


def _nearest(bits: Lane, grid: Grid, word: Word) -> Lane:
    """Nearest even by the exact addition of ``fast_paths.nearest_lines``."""
    m = InductorLanes(word)
    f = m.minimum(bits & word.magnitude, largest_kept(grid, word))
    e = m.maximum(f & word.inf, (grid.c1 - grid.d0) << word.man)
    c = e + (grid.d0 << word.man)
    x, big = (ops.to_dtype_bitcast(v.value, word.float_dtype, word.int_dtype) for v in (f, c))
    r = ops.sub(ops.add(x, big), big)
    rounded = ops.to_dtype_bitcast(r, word.int_dtype, word.float_dtype)
    return finished(m, bits, InductorExpression(rounded, word.int_dtype), grid, word)


def _rounded(bits: Lane, fmt: Element, carrier: Carrier, mode: Rounding, u: Lane) -> Lane:
    word = carrier.word
    if mode is Rounding.TIES_TO_EVEN and isinstance(fmt, FloatingPoint | FixedPoint):
        grid = grid_of(fmt, carrier, mode)
        if fast_path(grid, word, mode) is not Fast.NO:
            return _nearest(bits, grid, word)
    return element_bits(InductorLanes(word), bits, fmt, carrier, mode, u)


def _value(bits: Lane, carrier: Carrier) -> Any:
    """The value of the carrier's dtype with these bits."""
    word = carrier.word
    out = ops.to_dtype_bitcast(bits.value, word.float_dtype, word.int_dtype)
    return ops.to_dtype(out, carrier.dtype, src_dtype=word.float_dtype)


def _random(load: Loader | None, index: Sequence[Any], carrier: Carrier) -> Lane:
    if load is None:
        return None
    u = InductorExpression(load(index), torch.int32)
    return widened(u) & 0xFFFFFFFF if carrier.word.bits == 64 else u


def _elements(x: Any, fmt: Element, mode: Rounding, load_u: Loader | None) -> Any:
    carrier, load = carrier_of(x.get_dtype()), x.make_loader()

    def inner(index: Sequence[Any]) -> Any:
        bits, u = _bits(load(index), carrier), _random(load_u, index, carrier)
        return _value(_rounded(bits, fmt, carrier, mode, u), carrier)

    return _pointwise(x, inner, list(x.get_size()))


def _pointwise(x: Any, inner: Callable[[Sequence[Any]], Any], ranges: list[Any]) -> Any:
    return ir.Pointwise.create(
        device=x.get_device(), dtype=x.get_dtype(), inner_fn=inner, ranges=ranges
    )


def _split(blocks: Blocks, size: list[Any]) -> tuple[list[Any], list[int], int | None]:
    """(ranges, the dims of them that a block spans, the axis that was split in two)."""
    if blocks.dim is not None:
        own = blocks.dim % len(size)
        return size, [d for d in range(len(size)) if d != own], None
    if blocks.axis is None or blocks.run is None:
        return size, list(range(len(size))), None
    axis = blocks.axis % len(size)
    n = size[axis]
    if V.graph.sizevars.statically_known_leq(n, blocks.run):
        return size, [axis], None
    return [*size[:axis], n // blocks.run, blocks.run, *size[axis + 1 :]], [axis + 1], axis


def _divides(blocks: Blocks, size: list[Any]) -> bool:
    if not size:
        return False
    if blocks.axis is None or blocks.run is None:
        return True
    known, n = V.graph.sizevars, size[blocks.axis % len(size)]
    return bool(
        known.statically_known_leq(n, blocks.run)
        or known.statically_known_multiple_of(n, blocks.run)
    )


def _blocks(x: Any, fmt: Block, blocks: Blocks, mode: Rounding, load_u: Loader | None) -> Any:
    carrier, size = carrier_of(x.get_dtype()), list(x.get_size())
    word, lanes = carrier.word, InductorLanes(carrier.word)
    ranges, spanned, axis = _split(blocks, size)
    kept = [d for d in range(len(ranges)) if d not in spanned]
    # Two loops read it.
    x.mark_reuse(2)
    load = x.make_loader()

    def whole(index: Sequence[Any]) -> list[Any]:
        """Index into x of an index into the split ranges."""
        if axis is None:
            return list(index)
        joined = index[axis] * blocks.run + index[axis + 1]
        return [*index[:axis], joined, *index[axis + 2 :]]

    def magnitude(index: Sequence[Any], within: Sequence[Any]) -> Any:
        full: list[Any] = [None] * len(ranges)
        for d, i in zip((*kept, *spanned), (*index, *within), strict=True):
            full[d] = i
        a = _bits(load(whole(full)), carrier) & word.magnitude
        return lanes.where(a < word.inf, a, 0).value

    amax = ir.Reduction.create(
        device=x.get_device(),
        dst_dtype=word.int_dtype,
        src_dtype=word.int_dtype,
        inner_fn=magnitude,
        ranges=[ranges[d] for d in kept],
        reduction_ranges=[ranges[d] for d in spanned],
        reduction_type="max",
    )
    amax.realize()
    load_amax = amax.make_loader()

    def inner(index: Sequence[Any]) -> Any:
        at = whole(index)
        largest = InductorExpression(load_amax([index[d] for d in kept]), word.int_dtype)
        u = _random(load_u, at, carrier)
        bits = _bits(load(at), carrier)
        return _value(block_bits(lanes, bits, largest, fmt, carrier, mode, u), carrier)

    out = _pointwise(x, inner, ranges)
    return out if axis is None else lowerings[torch.ops.aten.view.default](out, size)


@functools.cache
def register() -> None:
    """Register the lowering with Inductor, once."""
    operator = torch.ops.qinductor.fake_quantize.default

    @register_lowering(operator, type_promotion_kind=None)  # type: ignore[untyped-decorator,unused-ignore]
    def lower(
        x: Any,
        seed: Any,
        step: Any,
        format: str,
        rounding: str,
        site: int,
        random_bits: int,
        index_offset: int,
        mask: bool,
        digest: int,
    ) -> Any:
        fmt, mode = parse_format(format), Rounding[rounding]
        blocks = blocks_of(fmt, x) if isinstance(fmt, Block) else None
        whole = blocks is None or _divides(blocks, x.get_size())
        if why_not_fused(fmt) is not None or not whole:
            handler = fallback_handler(operator, add_to_fallback_set=False)
            return handler(
                *(x, seed, step, format, rounding, site, random_bits, index_offset, mask, digest)
            )
        load_u = None
        if mode is Rounding.STOCHASTIC:
            draw = fallback_handler(random_bits_op._opoverload, add_to_fallback_set=False)
            u = draw(seed, step, list(x.get_size()), site, random_bits, index_offset)
            load_u = u.make_loader()
        if isinstance(fmt, Block):
            assert blocks is not None
            return _blocks(x, fmt, blocks, mode, load_u)
        assert isinstance(fmt, Element)
        return _elements(x, fmt, mode, load_u)
