"""QPyTorch's quantizing functions: float32 tensors in, new float32 tensors out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from qinductor.errors import ConfigError
from qinductor.numerics import Rounding, quantize

from .number import BlockFloatingPoint, FixedPoint, FloatingPoint, Number

__all__ = ["Quantizer", "block_quantize", "fixed_point_quantize", "float_quantize", "quantizer"]

ROUNDING = {"nearest": Rounding.TIES_TO_EVEN, "stochastic": Rounding.STOCHASTIC}
"""QPyTorch's names of the modes; its formats have ties of their own."""


def _mode(rounding: str) -> Rounding:
    if rounding not in ROUNDING:
        raise ConfigError(f"rounding={rounding!r} is not valid. Valid: {', '.join(ROUNDING)}.")
    return ROUNDING[rounding]


def _rounded(x: Tensor, number: Number, rounding: str) -> Tensor:
    if not isinstance(x, Tensor):
        raise ConfigError(f"x must be a float32 tensor, not {type(x).__name__}.")
    return quantize(x.detach(), number, _mode(rounding))


def fixed_point_quantize(
    x: Tensor,
    wl: int,
    fl: int,
    clamp: bool = True,
    symmetric: bool = False,
    rounding: str = "stochastic",
) -> Tensor:
    """X in fixed point: k·2^−fl, k in [−2^(wl−1), 2^(wl−1)−1] where ``clamp``.

    Args:
        x: float32, any shape.
        wl: word length, 2 to 53.
        fl: fractional bits, -100 to 149.
        clamp: whether the range is bounded.
        symmetric: drop the minimum.
        rounding: "nearest" (ties to even) or "stochastic".

    Returns:
        float32 of x's shape; without a gradient, as in QPyTorch: see :func:`quantizer`.

    Raises:
        ConfigError: (a ValueError) an argument is not valid.
    """
    return _rounded(x, FixedPoint(wl, fl, clamp, symmetric), rounding)


def float_quantize(x: Tensor, exp: int, man: int, rounding: str = "stochastic") -> Tensor:
    """X in floating point of 1 + exp + man bits without special codes; it saturates.

    Args:
        x: float32, any shape.
        exp: 1 to 8.
        man: 0 to 23.
        rounding: "nearest" (ties away from zero) or "stochastic".

    Returns:
        float32 of x's shape, without a gradient.

    Raises:
        ConfigError: (a ValueError) an argument is not valid.
    """
    return _rounded(x, FloatingPoint(exp, man), rounding)


def block_quantize(x: Tensor, wl: int, dim: int = -1, rounding: str = "stochastic") -> Tensor:
    """X in block floating point with wl-bit elements.

    Args:
        x: float32, any shape.
        wl: word length, 2 to 53.
        dim: one exponent for each index of this dim; -1: one in all.
        rounding: "nearest" (half up, after a sum in float32) or "stochastic".

    Returns:
        float32 of x's shape, without a gradient.

    Raises:
        ConfigError: (a ValueError) an argument is not valid.
    """
    return _rounded(x, BlockFloatingPoint(wl, dim), rounding)


class _Rounding(torch.autograd.Function):
    """Quantize forward, and the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, options: _Options) -> Tensor:
        ctx.options = options
        number, mode = options.forward_number, options.forward_mode
        if number is None:
            return x.view_as(x)
        if not (options.clamping_grad_zero and isinstance(number, FixedPoint)):
            return quantize(x, number, mode)
        # What is masked is the rounded value outside the range, not the input.
        free = quantize(x, number.replace(clamp=False), mode)
        q = quantize(free, number)
        ctx.save_for_backward((free < q) | (free > q))
        return q

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        options = ctx.options
        for hook in options.backward_hooks:
            grad = hook(grad)
        if options.backward_number is not None:
            grad = quantize(grad, options.backward_number, options.backward_mode)
        # As in QPyTorch after the rounding: a masked element still counts for its block's scale.
        for mask in ctx.saved_tensors:
            grad = grad.masked_fill(mask, 0)
        return grad, None


class _Options:
    """Checked arguments of :func:`quantizer`."""

    def __init__(
        self,
        forward_number: Number | None,
        backward_number: Number | None,
        forward_rounding: str,
        backward_rounding: str,
        clamping_grad_zero: bool,
        backward_hooks: Iterable[Callable[[Tensor], Tensor]],
    ) -> None:
        for name, number in (("forward", forward_number), ("backward", backward_number)):
            if number is not None and not isinstance(number, Number):
                raise ConfigError(
                    f"{name}_number={number!r} must be None or a qtorch FixedPoint, FloatingPoint "
                    "or BlockFloatingPoint."
                )
        if clamping_grad_zero and forward_number is not None:
            clamped = isinstance(forward_number, FixedPoint) and forward_number.clamp
            if not clamped:
                raise ConfigError(
                    f"clamping_grad_zero=True needs a clamped FixedPoint as forward_number, not "
                    f"{forward_number}. Use FixedPoint(wl, fl, clamp=True)."
                )
        self.forward_number, self.backward_number = forward_number, backward_number
        self.forward_mode, self.backward_mode = _mode(forward_rounding), _mode(backward_rounding)
        self.clamping_grad_zero = clamping_grad_zero
        self.backward_hooks = tuple(backward_hooks)


def quantizer(
    forward_number: Number | None = None,
    backward_number: Number | None = None,
    forward_rounding: str = "stochastic",
    backward_rounding: str = "stochastic",
    clamping_grad_zero: bool = False,
    backward_hooks: Iterable[Callable[[Tensor], Tensor]] = (),
) -> Callable[[Tensor], Tensor]:
    """A function float32 tensor → float32 tensor that quantizes it, and its gradient.

    Args:
        forward_number: format of the tensor; None leaves it as it is.
        backward_number: format of the gradient; None leaves it as it is.
        forward_rounding: "stochastic" or "nearest".
        backward_rounding: "stochastic" or "nearest".
        clamping_grad_zero: zero the gradient where the rounded value was clamped; the forward
            number must be a clamped FixedPoint, or None. Not only with a backward number.
        backward_hooks: functions applied to the gradient, in order, before it is quantized.

    Raises:
        ConfigError: (a ValueError) an argument is not valid.
    """
    options = _Options(
        *(forward_number, backward_number, forward_rounding, backward_rounding),
        *(clamping_grad_zero, backward_hooks),
    )

    def quantize_both_ways(x: Tensor) -> Tensor:
        result: Tensor = _Rounding.apply(x, options)  # type: ignore[no-untyped-call]
        return result

    return quantize_both_ways


class Quantizer(nn.Module):
    """:func:`quantizer` as a module without parameters or buffers."""

    def __init__(
        self,
        forward_number: Number | None = None,
        backward_number: Number | None = None,
        forward_rounding: str = "stochastic",
        backward_rounding: str = "stochastic",
    ) -> None:
        super().__init__()
        self.options = _Options(
            *(forward_number, backward_number, forward_rounding, backward_rounding, False, ())
        )

    def forward(self, x: Tensor) -> Tensor:
        """X quantized: float32 of any shape."""
        result: Tensor = _Rounding.apply(x, self.options)  # type: ignore[no-untyped-call]
        return result

    def extra_repr(self) -> str:
        """Formats and modes."""
        o = self.options
        return (
            f"forward={o.forward_number!s} {o.forward_mode.name}, "
            f"backward={o.backward_number!s} {o.backward_mode.name}"
        )
