"""Inductor lowerings of the package's operators.

Quantizers become pointwise (and row reduction) IR, which Inductor fuses into its neighbours. The
int8 linear becomes a template of :data:`qinductor.templates.TEMPLATES`, or the eager operator.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor import lowering as L
from torch._inductor.virtualized import V

from .. import fp8 as _fp8  # noqa: F401 - defines the operator
from .. import ops as _ops  # noqa: F401 - defines the operators
from .. import packing as _packing  # noqa: F401 - defines packed_of
from ..capability import Capability, Gpu
from ..ops import ZERO_POINT_S8
from . import GPU_TEMPLATES, TEMPLATES
from .arithmetic import apply, codes, product, quotient, reciprocal
from .base import KERNEL_META, Implementation, choose
from .cpu.qlinear import Epilogue, QLinearTemplate

aten = torch.ops.aten
qinductor = torch.ops.qinductor


def implementation(op: str) -> Implementation:
    """What the pass chose for the node being lowered; the machine's best without our passes."""
    node = V.graph.current_node
    chosen = node.meta.get(KERNEL_META) if node is not None else None
    chosen = chosen or choose(TEMPLATES[op, "cpu"], Capability.detect())
    assert chosen is not None, "the portable one needs nothing"
    return chosen


def _gpu_for(op: str, x: Any) -> Gpu | None:
    """The CUDA device that has a template of ``op`` for ``x``; None where the eager body runs."""
    capability = Capability.detect()
    if x.get_device().type != "cuda" or choose(GPU_TEMPLATES[op], capability) is None:
        return None
    return capability.gpu


@L.register_lowering(qinductor.quantize.default, type_promotion_kind=None)
def _quantize(x: Any, inverse_scale: Any, zero_point: Any) -> Any:
    return codes(L.to_dtype(x, torch.float32), inverse_scale, L.to_dtype(zero_point, torch.float32))


@L.register_lowering(qinductor.quantize_per_token.default, type_promotion_kind=None)
def _quantize_per_token(
    x: Any,
    multiplier: Any = None,
    divisor: float = 127.0,
    min_scale: float = torch.finfo(torch.float32).tiny,
) -> Any:
    t = L.to_dtype(x, torch.float32)
    if multiplier is not None:
        t = product(t, multiplier)
    amax = apply(aten.amax.default, apply(aten.abs.default, t), [-1], True)
    scale = apply(aten.maximum.default, quotient(amax, divisor), min_scale)
    return codes(t, reciprocal(scale), float(ZERO_POINT_S8)), scale


@L.register_lowering(qinductor.packed_of.default, type_promotion_kind=None)
def _packed_of(weights: Any, zero_points: Any) -> Any:
    tensors = L.fallback_handler(qinductor.packed_of.default, add_to_fallback_set=False)(
        weights, zero_points
    )
    # They belong to a cache: Inductor may not reuse their memory for another buffer.
    V.graph.never_reuse_buffers.update(tensor.get_name() for tensor in tensors)
    return tensors


@L.register_lowering(qinductor.qlinear.default, type_promotion_kind=None)
def _qlinear(
    x: Any,
    x_scale: Any,
    x_zero_point: Any,
    packed: Any,
    w_scale: Any,
    w_sum: Any,
    bias: Any = None,
    residual: Any = None,
    activation: str = "none",
    out_dtype: torch.dtype = torch.float32,
    out_inverse_scale: Any = None,
    out_zero_point: Any = None,
) -> Any:
    if x.get_device().type != "cpu":
        arguments = (
            x, x_scale, x_zero_point, packed, w_scale, w_sum, bias, residual, activation,
            out_dtype, out_inverse_scale, out_zero_point,
        )  # fmt: skip
        if (gpu := _gpu_for("qlinear", x)) is not None:
            from .triton.qlinear import lower_qlinear

            return lower_qlinear(gpu, *arguments)
        return L.fallback_handler(qinductor.qlinear.default, add_to_fallback_set=False)(*arguments)
    *lead, k = x.get_size()
    # Compile-time facts of a kernel, even where torch.compile(dynamic=True) made them symbols.
    k, n = (V.graph.sizevars.guard_int(size) for size in (k, w_scale.get_size()[0]))
    m = sympy.Mul(*lead)
    if residual is not None:
        residual = L.view(residual, [m, n])
    given = {
        "x": L.view(x, [m, k]),
        "x_scale": x_scale,
        "x_zero_point": x_zero_point,
        "packed_0": packed,
        "w_scale_0": w_scale,
        "w_sum_0": w_sum,
        "bias_0": bias,
        "residual": residual,
        "out_inverse_scale": out_inverse_scale,
        "out_zero_point": out_zero_point,
    }
    template = QLinearTemplate(
        implementation("qlinear"),
        operands(given),
        ir.FixedLayout(x.get_device(), out_dtype, [m, n]),
        Epilogue(
            activation,
            per_token=has_many_elements(x_scale),
            out_per_channel=has_many_elements(out_inverse_scale),
        ),
    )
    return L.view(template.emit()[0], [*lead, n])


@L.register_lowering(qinductor.fp8_linear.default, type_promotion_kind=None)
def _fp8_linear(
    x: Any,
    x_scale: Any,
    weight: Any,
    w_scale: Any,
    bias: Any = None,
    out_dtype: torch.dtype = torch.float32,
) -> Any:
    arguments = (x, x_scale, weight, w_scale, bias, out_dtype)
    if (gpu := _gpu_for("fp8_linear", x)) is not None:
        from .triton.fp8_linear import lower_fp8_linear

        return lower_fp8_linear(gpu, *arguments)
    return L.fallback_handler(qinductor.fp8_linear.default, add_to_fallback_set=False)(*arguments)


def operands(given: dict[str, Any]) -> dict[str, Any]:
    """The operands that are there, each realized and contiguous."""
    return {name: contiguous(node) for name, node in given.items() if node is not None}


def contiguous(node: Any) -> Any:
    """The node's buffer, or a contiguous copy of it."""
    return ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(node))


def has_many_elements(node: Any) -> bool:
    """True for a tensor, unless it has one element whatever its symbols are."""
    if node is None:
        return False
    return not V.graph.sizevars.statically_known_equals(sympy.Mul(*node.get_size()), 1)
