"""Which calls are simulated, and which of their tensors has which role.

One table for both executions: eager code is seen as the functions and methods that it calls, and
so is Dynamo's graph.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Callee = Callable[..., Any]


class Role(enum.Enum):
    """What a tensor is to an operation. Gradients are rounded as they pass that place backward."""

    INPUT = "input"
    WEIGHT = "weight"
    BIAS = "bias"
    OUTPUT = "output"
    GRAD_OUTPUT = "grad_output"
    GRAD_INPUT = "grad_input"
    GRAD_WEIGHT = "grad_weight"
    ACCUMULATOR = "accumulator"

    @property
    def gradient(self) -> Role | None:
        """The role of this operand's gradient; None for what has none."""
        return {Role.INPUT: Role.GRAD_INPUT, Role.WEIGHT: Role.GRAD_WEIGHT}.get(self)


_FLOW_ROLES = (Role.INPUT, Role.OUTPUT, Role.GRAD_OUTPUT, Role.GRAD_INPUT)
_MATMUL_ROLES = (*_FLOW_ROLES, Role.WEIGHT, Role.GRAD_WEIGHT, Role.ACCUMULATOR)

OPERATIONS: dict[str, frozenset[Role]] = {
    "linear": frozenset((*_MATMUL_ROLES, Role.BIAS)),
    "matmul": frozenset((*_MATMUL_ROLES, Role.BIAS)),
    "bmm": frozenset((*_MATMUL_ROLES, Role.BIAS)),
    "conv1d": frozenset((*_MATMUL_ROLES, Role.BIAS)),
    "conv2d": frozenset((*_MATMUL_ROLES, Role.BIAS)),
    "conv3d": frozenset((*_MATMUL_ROLES, Role.BIAS)),
    "sdpa_qk": frozenset(_MATMUL_ROLES),
    "sdpa_pv": frozenset(_MATMUL_ROLES),
    "embedding": frozenset((Role.WEIGHT, Role.OUTPUT, Role.GRAD_OUTPUT, Role.GRAD_WEIGHT)),
    "norm": frozenset(_FLOW_ROLES),
    "add": frozenset(_FLOW_ROLES),
}
"""Operations by name, and the roles each has. ``add`` is a sum of two float tensors of one shape
(a residual), ``norm`` any of layer, batch, group, instance and RMS norm; ``sdpa_qk`` and
``sdpa_pv`` are the products of scaled dot-product attention."""


@dataclass(frozen=True)
class Operand:
    """A tensor argument: its role, its position, and its name as a keyword."""

    role: Role
    position: int
    keyword: str


@dataclass(frozen=True)
class Form:
    """How one callee spells an operation.

    Attributes:
        operation: a key of :data:`OPERATIONS`, or ``sdpa`` or ``mha``, which consist of several.
        operands: its tensors.
        in_place: the out-of-place callee, where this one writes its first argument.
    """

    operation: str
    operands: tuple[Operand, ...] = ()
    in_place: Callee | None = None


def _form(operation: str, *operands: tuple[Role, int, str]) -> Form:
    return Form(operation, tuple(Operand(*o) for o in operands))


_I, _W, _B = Role.INPUT, Role.WEIGHT, Role.BIAS
_LINEAR = _form("linear", (_I, 0, "input"), (_W, 1, "weight"), (_B, 2, "bias"))
_MATMUL = _form("matmul", (_I, 0, "input"), (_W, 1, "other"))
_REVERSED = _form("matmul", (_I, 1, "other"), (_W, 0, "self"))
_MM = _form("matmul", (_I, 0, "input"), (_W, 1, "mat2"))
_ADDMM = _form("matmul", (_B, 0, "input"), (_I, 1, "mat1"), (_W, 2, "mat2"))
_BMM = _form("bmm", (_I, 0, "input"), (_W, 1, "mat2"))
_BADDBMM = _form("bmm", (_B, 0, "input"), (_I, 1, "batch1"), (_W, 2, "batch2"))
_ADD = _form("add", (_I, 0, "input"), (_I, 1, "other"))
_ADD_INTO = Form("add", _ADD.operands, in_place=torch.add)
_NORM = _form("norm", (_I, 0, "input"))


def _conv(name: str) -> Form:
    return _form(name, (_I, 0, "input"), (_W, 1, "weight"), (_B, 2, "bias"))


def _forms() -> Iterator[tuple[Any, Form]]:
    tensor: Any = torch.Tensor
    yield F.linear, _LINEAR
    for function in (torch.matmul, torch.linalg.matmul, tensor.matmul, tensor.__matmul__):
        yield function, _MATMUL
    yield operator.matmul, _MATMUL
    yield tensor.__rmatmul__, _REVERSED
    for function in (torch.mm, tensor.mm):
        yield function, _MM
    for function in (torch.addmm, tensor.addmm):
        yield function, _ADDMM
    for function in (torch.bmm, tensor.bmm):
        yield function, _BMM
    for function in (torch.baddbmm, tensor.baddbmm):
        yield function, _BADDBMM
    for dims in (1, 2, 3):
        for module in (torch, F):
            yield getattr(module, f"conv{dims}d"), _conv(f"conv{dims}d")
    yield F.embedding, _form("embedding", (_W, 1, "weight"))
    yield torch.embedding, _form("embedding", (_W, 0, "weight"))
    for name in ("layer_norm", "batch_norm", "group_norm", "instance_norm", "rms_norm"):
        for module in (torch, F):
            yield getattr(module, name), _NORM
    for function in (torch.add, tensor.add, tensor.__add__, tensor.__radd__, operator.add):
        yield function, _ADD
    for function in (tensor.add_, tensor.__iadd__, operator.iadd):
        yield function, _ADD_INTO
    yield F.scaled_dot_product_attention, Form("sdpa")
    yield F.multi_head_attention_forward, Form("mha")


FORMS: dict[Any, Form] = dict(_forms())
"""Every callee that is an operation."""


def form_of(callee: Any) -> Form | None:
    """The form of a function or of a method's name; None where it is no operation."""
    if isinstance(callee, str):
        callee = getattr(torch.Tensor, callee, None)
    try:
        return FORMS.get(callee)
    except TypeError:  # not hashable
        return None
