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

from .. import attention as _attention  # noqa: F401 - defines the operator
from .. import fp8 as _fp8  # noqa: F401 - defines the operator
from .. import ops as _ops  # noqa: F401 - defines the operators
from .. import packing as _packing  # noqa: F401 - defines packed_of
from ..capability import Capability, Gpu
from ..ops import ZERO_POINT_S8
from . import GPU_TEMPLATES, TEMPLATES
from .arithmetic import apply, codes, product, quotient, reciprocal
from .base import KERNEL_META, Implementation, choose
from .cpu.attention import AttentionTemplate
from .cpu.qlinear import QLinearTemplate

aten = torch.ops.aten
qinductor = torch.ops.qinductor


def _implementation(op: str) -> Implementation | None:
    """What the pass chose for the node being lowered; the machine's best without our passes."""
    node = V.graph.current_node
    chosen = node.meta.get(KERNEL_META) if node is not None else None
    return chosen or choose(TEMPLATES[op, "cpu"], Capability.detect())


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
        "packed": packed,
        "w_scale": w_scale,
        "w_sum": w_sum,
        "bias": bias,
        "residual": residual,
        "out_inverse_scale": out_inverse_scale,
        "out_zero_point": out_zero_point,
    }
    operands = {name: _contiguous(node) for name, node in given.items() if node is not None}
    implementation = _implementation("qlinear")
    assert implementation is not None, "the portable one needs nothing"
    template = QLinearTemplate(
        implementation,
        operands,
        ir.FixedLayout(x.get_device(), out_dtype, [m, n]),
        activation,
        per_token=_has_many_elements(x_scale),
        out_per_channel=out_inverse_scale is not None and _has_many_elements(out_inverse_scale),
    )
    output = template.generate().output_node()  # type: ignore[no-untyped-call]
    return L.view(output, [*lead, n])


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


def _contiguous(node: Any) -> Any:
    return ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(node))


def _has_many_elements(node: Any) -> bool:
    """True unless the tensor has one element whatever its symbols are."""
    return not V.graph.sizevars.statically_known_equals(sympy.Mul(*node.get_size()), 1)


@L.register_lowering(qinductor.attention.default, type_promotion_kind=None)
def _attention_lowering(
    q: Any,
    k: Any,
    v: Any,
    heads: int,
    scale: float,
    mask: Any = None,
    causal: bool = False,
    out_dtype: torch.dtype = torch.float32,
    out_inverse_scale: Any = None,
    out_zero_point: Any = None,
) -> Any:
    implementation = _implementation("attention") if q.get_device().type == "cpu" else None
    if implementation is None:
        eager = L.fallback_handler(qinductor.attention.default, add_to_fallback_set=False)
        return eager(
            q, k, v, heads, scale, mask, causal, out_dtype, out_inverse_scale, out_zero_point
        )
    given = {
        "q": q,
        "k": k,
        "v": v,
        "out_inverse_scale": out_inverse_scale,
        "out_zero_point": out_zero_point,
    }
    operands = {name: _contiguous(node) for name, node in given.items() if node is not None}
    if mask is not None:
        operands["mask"] = _mask_operand(mask, q, k)
    *batch_and_length, last = q.get_size()
    width = V.graph.sizevars.guard_int(last)
    template = AttentionTemplate(
        implementation,
        operands,
        # Head sizes are compile-time constants of the kernel; batch and lengths are not.
        ir.FixedLayout(q.get_device(), out_dtype, [*batch_and_length, width]),
        heads,
        scale,
        causal,
        out_per_channel=out_inverse_scale is not None and _has_many_elements(out_inverse_scale),
    )
    return template.generate().output_node()  # type: ignore[no-untyped-call]


def _mask_operand(mask: Any, q: Any, k: Any) -> Any:
    """The additive mask with four dimensions, float32, its last dimension one row of keys."""
    keys = k.get_size()[1]
    if mask.get_dtype() is torch.bool:
        seen, hidden = (
            apply(aten.full.default, [], value, dtype=torch.float32, device=q.get_device())
            for value in (0.0, float("-inf"))
        )
        mask = apply(aten.where.self, mask, seen, hidden)
    mask = L.to_dtype(mask, torch.float32)
    mask = L.view(mask, [1] * (4 - len(mask.get_size())) + list(mask.get_size()))
    shape = [*mask.get_size()[:3], keys]
    return _contiguous(L.expand(mask, shape))
