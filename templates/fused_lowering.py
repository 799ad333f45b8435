"""Inductor lowerings of the operators that the passes write (:mod:`qinductor.fused_ops`).

The passes write them for the CPU only.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor import lowering as L
from torch._inductor.virtualized import V

from .. import fused_ops as _fused_ops  # noqa: F401 - defines the operators
from .cpu.qlinear import Epilogue, QLinearTemplate, weight_operand
from .cpu.qlinear_rows import QLinearRowsTemplate, RowEpilogue
from .lowering import has_many_elements, implementation, operands

qinductor = torch.ops.qinductor


def _sizes(x: Any, w_scale: Any) -> tuple[list[Any], Any, int, int]:
    """Leading sizes, their product M, and N and K, which are facts at compile time."""
    *lead, inner = x.get_size()
    k, n = (V.graph.sizevars.guard_int(size) for size in (inner, w_scale.get_size()[0]))
    return lead, sympy.Mul(*lead), n, k


@L.register_lowering(qinductor.qlinear_merged.default, type_promotion_kind=None)
def _qlinear_merged(
    x: Any,
    x_scale: Any,
    x_zero_point: Any,
    packed: list[Any],
    w_scale: list[Any],
    w_sum: list[Any],
    bias: list[Any],
    out_dtype: torch.dtype = torch.float32,
) -> Any:
    lead, m, n, k = _sizes(x, w_scale[0])
    given = {"x": L.view(x, [m, k]), "x_scale": x_scale, "x_zero_point": x_zero_point}
    lists = {"packed": packed, "w_scale": w_scale, "w_sum": w_sum, "bias": bias}
    for name, nodes in lists.items():
        given |= {weight_operand(name, index): node for index, node in enumerate(nodes)}
    template = QLinearTemplate(
        implementation("qlinear_merged"),
        operands(given),
        ir.FixedLayout(x.get_device(), out_dtype, [m, n * len(packed)]),
        Epilogue(per_token=has_many_elements(x_scale)),
        weights=len(packed),
    )
    return L.view(template.emit()[0], [*lead, n * len(packed)])


@L.register_lowering(qinductor.qlinear_rows.default, type_promotion_kind=None)
def _qlinear_rows(
    x: Any,
    x_scale: Any,
    x_zero_point: Any,
    packed: Any,
    w_scale: Any,
    w_sum: Any,
    bias: Any,
    residual: Any,
    activation: str,
    norm_weight: Any,
    norm_bias: Any,
    eps: float,
    keeps: bool,
    quantizer: str,
    out_inverse_scale: Any,
    out_zero_point: Any,
    multiplier: Any,
    divisor: float,
    min_scale: float,
) -> Any:
    lead, m, n, k = _sizes(x, w_scale)
    given = {
        "x": L.view(x, [m, k]),
        "x_scale": x_scale,
        "x_zero_point": x_zero_point,
        weight_operand("packed", 0): packed,
        weight_operand("w_scale", 0): w_scale,
        weight_operand("w_sum", 0): w_sum,
        weight_operand("bias", 0): bias,
        "residual": None if residual is None else L.view(residual, [m, n]),
        "norm_weight": norm_weight,
        "norm_bias": norm_bias,
        "row_inverse_scale": out_inverse_scale,
        "row_zero_point": out_zero_point,
        "multiplier": multiplier,
    }
    made = [
        (name, ir.FixedLayout(x.get_device(), dtype, [m, columns]))
        for name, dtype, columns, present in (
            ("kept", torch.float32, n, keeps),
            ("codes", torch.uint8, n, quantizer != "none"),
            ("scales", torch.float32, 1, quantizer == "per_token"),
        )
        if present
    ]
    # Inductor allocates what is read; the kernel must not name anything else.
    read = _outputs_read(len(made))
    outputs = {name: layout for index, (name, layout) in enumerate(made) if index in read}
    template = QLinearRowsTemplate(
        implementation("qlinear_rows"),
        operands(given),
        outputs,
        Epilogue(activation, per_token=has_many_elements(x_scale)),
        RowEpilogue(quantizer, eps, divisor, min_scale, has_many_elements(out_inverse_scale)),
    )
    emitted = dict(zip(outputs, template.emit(), strict=True))
    return [
        L.view(emitted[name], [*lead, layout.size[1]]) if name in emitted else None
        for name, layout in made
    ]


def _outputs_read(count: int) -> set[int]:
    """Which outputs of the node being lowered have a reader."""
    node = V.graph.current_node
    if node is None:
        return set(range(count))
    return {user.args[1] for user in node.users if user.target is operator.getitem and user.users}
