"""The operator qinductor::quantize_gradient: identity forward, a quantizer backward.

It decomposes into an autograd function, so a compiled graph holds the quantizer of the gradient and
no copy of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qinductor.numerics.named import parse_format
from qinductor.numerics.quantize import quantize
from qinductor.numerics.rounding import Rounding

_LIBRARY = torch.library.Library("qinductor", "FRAGMENT")
_LIBRARY.define(
    "quantize_gradient(Tensor x, Tensor? seed, Tensor? step, str format, str rounding, "
    "SymInt site, int random_bits, SymInt digest) -> Tensor"
)


class RoundGradient(torch.autograd.Function):
    """Identity; ``watch`` is told the gradient and what it was rounded to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Any, step: Any, options: Any, watch: Any) -> Tensor:
        """X's view."""
        ctx.options, ctx.watch = options, watch
        ctx.stochastic = seed is not None
        if ctx.stochastic:
            ctx.save_for_backward(seed, step)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient, rounded."""
        seed, step = ctx.saved_tensors if ctx.stochastic else (None, 0)
        format, rounding, site, random_bits = ctx.options
        q = quantize(
            grad,
            parse_format(format),
            Rounding[rounding],
            seed=seed,
            step=step,
            site=site,
            random_bits=random_bits,
        )
        if ctx.watch is not None:
            ctx.watch(grad, q)
        return q, None, None, None, None


def round_gradient(
    x: Tensor,
    seed: Tensor | None,
    step: Tensor | None,
    options: tuple[str, str, int, int],
    watch: Callable[[Tensor, Tensor], None] | None,
) -> Tensor:
    """x, whose gradient is rounded.

    ``options``: format, rounding, site, random bits. ``seed``: None where nothing is stochastic.
    """
    result: Tensor = RoundGradient.apply(x, seed, step, options, watch)  # type: ignore[no-untyped-call]
    return result


@torch.library.impl(_LIBRARY, "quantize_gradient", "CompositeImplicitAutograd")
def _quantize_gradient(
    x: Tensor,
    seed: Tensor | None,
    step: Tensor | None,
    format: str,
    rounding: str,
    site: int,
    random_bits: int,
    digest: int,
) -> Tensor:
    options = (format, rounding, site, random_bits)
    return round_gradient(x, seed, step, options, None)
