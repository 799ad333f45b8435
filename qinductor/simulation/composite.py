"""Operations that consist of others: attention, and functions written in Python.

They run as their parts, so that a spec reaches the products inside. Sites of the parts carry the
name and the call number of the whole.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .applying import Pass, perform
from .handle import Place
from .operations import OPERATIONS, Form, Operand, Role, form_of

_QK = Form("sdpa_qk", (Operand(Role.INPUT, 0, "input"), Operand(Role.WEIGHT, 1, "other")))
_PV = Form("sdpa_pv", _QK.operands)


def perform_composite(
    run: Pass,
    place: Place,
    form: Form,
    callee: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call attention with what the spec says around its parts."""
    call = run.next_call(place, form.operation)
    if not touches(run, place, form.operation):
        return callee(*args, **kwargs)
    inner = run.inside(f"{run.scope}{form.operation}{call}.")
    if form.operation == "sdpa":
        return attention(inner, place, *args, **kwargs)
    twin = plain_twin(callee)
    assert twin is not None
    with _Inside(inner, place):
        return twin(*args, **kwargs)


def touches(run: Pass, place: Place, operation: str) -> bool:
    """Whether the spec says anything of a part of sdpa or mha here."""
    parts = ("sdpa_qk", "sdpa_pv") if operation == "sdpa" else tuple(OPERATIONS)
    # Every part is asked: each marks the rules that it matches.
    found = [run.simulation.settings(place, part) for part in parts]
    return any(found)


class _Inside(TorchFunctionMode):
    """Simulates what a composite operation calls."""

    def __init__(self, run: Pass, place: Place) -> None:
        super().__init__()
        self.run, self.place = run, place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        form = form_of(func)
        if form is None:
            twin = plain_twin(func)
            if twin is None:
                return func(*args, **kwargs)
            with self:
                return twin(*args, **kwargs)
        if not form.operands:
            return perform_composite(self.run, self.place, form, func, args, kwargs)
        return perform(self.run, self.place, form, func, args, kwargs)


def attention(
    run: Pass,
    place: Place,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot-product attention as its documentation defines it, both products simulated.

    query (…, Hq, L, E), key (…, H, S, E), value (…, H, S, Ev) → (…, Hq, L, Ev).
    """
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = perform(run, place, _QK, torch.matmul, (query, key.transpose(-2, -1)), {}) * factor
    if is_causal:
        attn_mask = torch.ones(
            query.size(-2), key.size(-2), dtype=torch.bool, device=query.device
        ).tril()
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(attn_mask.logical_not(), float("-inf"))
        else:
            scores = scores + attn_mask
    weights = F.dropout(torch.softmax(scores, dim=-1), dropout_p, training=dropout_p > 0)
    return perform(run, place, _PV, torch.matmul, (weights, value), {})  # type: ignore[no-any-return]


@functools.cache
def plain_twin(function: Any) -> Callable[..., Any] | None:
    """A function of torch.nn.functional that does its work without asking for overrides.

    Such a function hands itself to the mode before it calls anything, whenever there is a mode.
    The twin is the same code with the answer "no" to that question, so that the mode sees what it
    calls. None for what is not written in Python.
    """
    if not isinstance(function, types.FunctionType) or function.__module__ != F.__name__:
        return None
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    namespace = {**function.__globals__, **dict.fromkeys(names, lambda *args: False)}
    twin = types.FunctionType(
        *(function.__code__, namespace, function.__name__),
        # A function that chooses between two holds them in its closure.
        *(function.__defaults__, tuple(map(_twin_cell, function.__closure__ or ()))),
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _twin_cell(cell: types.CellType) -> types.CellType:
    """The cell, or one with the twin of the function that it holds."""
    held = cell.cell_contents
    twin = plain_twin(held) if isinstance(held, types.FunctionType) else None
    return cell if twin is None else types.CellType(twin)
