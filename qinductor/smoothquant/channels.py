"""Following a tensor's channels back to the layer whose rows made them.

A smoothing factor can be folded into a Linear's rows when every operation between that Linear and
the tensor moves whole channels about, or commutes with scaling them by a positive number. Nothing
is concluded from shapes alone: the recorded layout operations are replayed on a tensor of channel
numbers, and the result must give one row a channel, the same for all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .tracing import Op, Recording, Ref

LAYOUT = frozenset(
    {
        "view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "contiguous", "clone",
        "transpose", "swapaxes", "swapdims", "permute", "movedim", "squeeze", "unsqueeze",
        "expand", "chunk", "split", "unbind",
    }
)  # fmt: skip
"""Operations that move elements and change none."""
SCALE_FREE = frozenset(
    {"relu", "leaky_relu", "dropout", "to", "float", "half", "bfloat16", "type_as", "clone"}
)
"""f with f(s * x) = s * f(x) for s > 0, element by element (a cast, up to rounding)."""
SCALARS = frozenset({"mul", "multiply", "div", "divide", "true_divide"})
"""Likewise, when the other operand is a Python number."""
WEIGHTED_SUMS = frozenset({"matmul", "bmm"})
"""Sums over tokens whose right operand keeps its channels: attention probabilities times V."""


@dataclass(frozen=True)
class Step:
    """One operation on the path, with the position of the value that carries the channels."""

    op: Op
    data: int
    out: int


def data_input(recording: Recording, op: Op) -> int | None:
    """Return the value whose channels reach the outputs of ``op``; None if there is none."""
    # Rounding to integers, by a cast or a division, does not commute with scaling.
    if op.kwargs.get("rounding_mode") or not all(recording.values[v].floating for v in op.outputs):
        return None
    if op.name in WEIGHTED_SUMS:
        operand = op.args[1] if len(op.args) > 1 else None
    elif op.name == "scaled_dot_product_attention":
        operand = op.args[2] if len(op.args) > 2 else op.kwargs.get("value")
    elif op.name == "dropout" and op.kwargs.get("training"):
        return None
    elif op.name in LAYOUT or op.name in SCALE_FREE:
        operand = op.args[0] if op.args else None
    elif op.name in SCALARS and any(isinstance(a, int | float) and a > 0 for a in op.args):
        operand = next((a for a in op.args if isinstance(a, Ref)), None)
    else:
        return None
    # Read twice by one call (as key and value, say): the scaling would show in the other role.
    if not isinstance(operand, Ref) or op.inputs.count(operand.value) != 1:
        return None
    return operand.value


def rows_of_channels(
    recording: Recording, steps: Sequence[Step], rows: int
) -> tuple[int, ...] | None:
    """Return for each channel at the end of a path the row of the Linear it comes from.

    Args:
        recording: where the operations were recorded.
        steps: the path, from the Linear's output on.
        rows: the Linear's number of output features.

    Returns:
        distinct row numbers, or None if a channel is not made of exactly one row of its own.
    """
    shape = recording.values[steps[0].data].shape if steps else None
    if shape is None or shape[-1] != rows:
        return None
    labels = torch.arange(rows, dtype=torch.int32).expand(shape)
    try:
        for step in steps:
            labels = _replay(step, labels, recording.values[step.out].shape)
    except (RuntimeError, IndexError, TypeError, _MixedError):
        return None
    flat = labels.reshape(-1, labels.shape[-1])
    if flat.shape[0] == 0 or not bool((flat == flat[:1]).all()):
        return None
    channels: list[int] = flat[0].tolist()
    return tuple(channels) if len(set(channels)) == len(channels) else None


class _MixedError(Exception):
    """An operation mixes channels."""


def _replay(step: Step, labels: Tensor, out_shape: torch.Size) -> Tensor:
    op = step.op
    if op.name in WEIGHTED_SUMS or op.name == "scaled_dot_product_attention":
        if not bool((labels == labels[..., :1, :]).all()):
            raise _MixedError
        return labels[..., :1, :].expand(out_shape)
    if op.name in LAYOUT and op.name != "clone":
        result: Any = op.function(*_with_labels(op, labels), **op.kwargs)
        moved: Tensor = result if isinstance(result, Tensor) else result[op.outputs.index(step.out)]
        if moved.shape != out_shape:
            raise _MixedError
        return moved
    return labels


def _with_labels(op: Op, labels: Tensor) -> tuple[Any, ...]:
    """Arguments of ``op`` with the first one replaced; a second tensor gives only its shape."""
    if any(isinstance(a, Ref) for a in op.args[1:]):
        raise _MixedError
    return (labels, *op.args[1:])
