"""Convolutions with a simulated accumulator: each of the three products as one matmul.

Forward: K runs over (channel, kernel position); the gradient of the input is a convolution of the
gradient, K over (output channel, kernel position); that of the weight has K over (batch, position).
Zeros of the padding are terms like any other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qinductor.errors import ConfigError

from .accumulate import accumulate
from .accumulator import Accumulator, parse_accumulator

Pair = tuple[int, int]


def convolution(
    site: str,
    accumulator: Accumulator,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """conv1d and conv2d: x (B, C, …) or (C, …), weight (O, C/groups, …).

    Raises:
        ConfigError: three spatial dimensions.
    """
    if weight.dim() == 5:
        raise ConfigError(
            f"{site}: the accumulator of a conv3d is not simulated. Give it accumulator=None in a "
            "later rule."
        )
    if x.dim() == weight.dim() - 1:
        return convolution(
            site, accumulator, x[None], weight, bias, stride, padding, dilation, groups
        )[0]
    one = weight.dim() == 3
    if one:
        x, weight = x[:, :, None], weight[:, :, None]
    s, d = _pair(stride, one, 1), _pair(dilation, one, 1)
    if isinstance(padding, str):
        spans = [d[i] * (weight.shape[2 + i] - 1) if padding == "same" else 0 for i in (0, 1)]
        # As torch does it: what is odd goes to the end.
        x = F.pad(x, (spans[1] // 2, spans[1] - spans[1] // 2,
                      spans[0] // 2, spans[0] - spans[0] // 2))  # fmt: skip
        p = (0, 0)
    else:
        p = _pair(padding, one, 0)
    y: Tensor = _Convolution.apply(x, weight, s, p, d, groups, accumulator.key)  # type: ignore[no-untyped-call]
    if one:
        y = y[:, :, 0]
    return y if bias is None else y + bias.to(y.dtype).view(-1, *[1] * (y.dim() - 2))


def _pair(value: Any, one: bool, neutral: int) -> Pair:
    values = (value,) if isinstance(value, int) else tuple(value)
    if one:
        return neutral, values[0]
    return (values[0], values[-1])


def _columns(x: Tensor, kernel: Pair, s: Pair, p: Pair, d: Pair, groups: int) -> Tensor:
    """(G, C/G·kernel, B·positions)."""
    columns = F.unfold(x, kernel, dilation=d, padding=p, stride=s)
    grouped = columns.unflatten(1, (groups, columns.shape[1] // groups))
    flat: Tensor = grouped.permute(1, 2, 0, 3).flatten(2)
    return flat


def _images(y: Tensor, size: tuple[int, ...]) -> Tensor:
    """(G, O/G, B·positions) → (B, O, …)."""
    images: Tensor = y.flatten(0, 1).unflatten(1, size).transpose(0, 1).contiguous()
    return images


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, s: Pair, p: Pair, d: Pair, groups: int, key: str
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.options = s, p, d, groups, key
        kernel = (w.shape[2], w.shape[3])
        size = [
            (x.shape[2 + i] + 2 * p[i] - d[i] * (kernel[i] - 1) - 1) // s[i] + 1 for i in (0, 1)
        ]
        columns = _columns(x, kernel, s, p, d, groups)
        rows = w.reshape(groups, w.shape[0] // groups, -1)
        y = accumulate(rows, columns, parse_accumulator(key))
        return _images(y, (x.shape[0], *size))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        s, p, d, groups, key = ctx.options
        accumulator = parse_accumulator(key)
        kernel = (w.shape[2], w.shape[3])
        grad_x = grad_w = None
        if ctx.needs_input_grad[1]:
            columns = _columns(x, kernel, s, p, d, groups)
            rows = grad.transpose(0, 1).reshape(groups, w.shape[0] // groups, -1)
            grad_w = accumulate(rows, columns.transpose(1, 2), accumulator).reshape(w.shape)
        if ctx.needs_input_grad[0]:
            grad_x = _input_gradient(grad, w, x, s, p, d, groups, accumulator)
        return grad_x, grad_w, None, None, None, None, None


def _input_gradient(
    grad: Tensor, w: Tensor, x: Tensor, s: Pair, p: Pair, d: Pair, groups: int, acc: Accumulator
) -> Tensor:
    """The convolution of the gradient, spread by the stride, with the flipped weight."""
    height, width = x.shape[2:]
    spans = [d[i] * (w.shape[2 + i] - 1) for i in (0, 1)]
    # Every input position needs all kernel positions: rows of zeros where no output reads it.
    sizes = [x.shape[2 + i] + 2 * p[i] + spans[i] for i in (0, 1)]
    spread = grad.new_zeros(*grad.shape[:2], *sizes)
    spread[
        :,
        :,
        spans[0] : spans[0] + (grad.shape[2] - 1) * s[0] + 1 : s[0],
        spans[1] : spans[1] + (grad.shape[3] - 1) * s[1] + 1 : s[1],
    ] = grad
    spread = spread[:, :, p[0] : p[0] + height + spans[0], p[1] : p[1] + width + spans[1]]
    columns = _columns(spread, (w.shape[2], w.shape[3]), (1, 1), (0, 0), d, groups)
    rows = w.flip(2, 3).unflatten(0, (groups, w.shape[0] // groups)).transpose(1, 2)
    y = accumulate(rows.flatten(2), columns, acc)
    return _images(y, (x.shape[0], height, width))
