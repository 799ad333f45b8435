"""The int8 linear layer on a CUDA device: the GEMM, and the epilogue as IR that Inductor fuses.

Tensor cores multiply signed codes. An activation's code u is uint8, so the GEMM takes u - 128, and
its sum lacks 128 times the weight's sum, which the epilogue adds with the zero point's correction:

    sum_k u[m, k] * w[n, k] - z * w_sum[n]
        = sum_k (u[m, k] - 128) * w[n, k] + (128 - z) * w_sum[n]

Both sides are exact integers. The subtraction of 128 is pointwise and becomes part of whatever
kernel makes the codes.
"""

from __future__ import annotations

import weakref
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor import lowering as L
from torch._inductor.virtualized import V

from ...capability import Gpu
from ...ops import K_GROUP, PANEL, ZERO_POINT_S8
from ..arithmetic import activation as apply_activation
from ..arithmetic import apply, aten, codes, product
from .gemm import gemm
from .tiles import Epilogue

# Linears that read the same codes share their signed copy. Keyed by graph, since Inductor may lower
# one FX graph twice, and a node belongs to one lowering.
_SIGNED: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def lower_qlinear(
    gpu: Gpu,
    x: Any,
    x_scale: Any,
    x_zero_point: Any,
    packed: Any,
    w_scale: Any,
    w_sum: Any,
    bias: Any,
    residual: Any,
    activation: str,
    out_dtype: torch.dtype,
    out_inverse_scale: Any,
    out_zero_point: Any,
) -> Any:
    """Lower one call of ``qinductor::qlinear``; arguments as its eager body has them."""
    *lead, k = x.get_size()
    k, n = (V.graph.sizevars.guard_int(size) for size in (k, w_scale.get_size()[0]))
    m = sympy.Mul(*lead)
    # The polynomial's coefficients are chosen among 16 segments, in registers.
    epilogue = Epilogue.HEAVY if activation == "gelu" else Epilogue.LIGHT
    acc = gemm(_signed_rows(x, m, k), weight_rows(packed), n, gpu, "s8", epilogue)
    if len(acc.get_size()) == 3:
        acc = L.sum_(acc, [0], dtype=torch.int32)
    missing = apply(aten.add.Tensor, apply(aten.neg.default, x_zero_point), ZERO_POINT_S8)
    acc = apply(aten.add.Tensor, acc, apply(aten.mul.Tensor, missing, w_sum))
    y = apply_activation(dequantized(acc, x_scale, w_scale, bias, m), activation)
    if residual is not None:
        y = apply(aten.add.Tensor, y, L.to_dtype(L.view(residual, [m, n]), torch.float32))
    if out_dtype is torch.uint8:
        y = codes(y, out_inverse_scale, L.to_dtype(out_zero_point, torch.float32))
    else:
        y = L.to_dtype(y, out_dtype)
    return L.view(y, [*lead, n])


def dequantized(acc: Any, x_scale: Any, w_scale: Any, bias: Any, m: Any) -> Any:
    """fl(fl(fl(acc) * x_scale[m]) * w_scale[n]) + bias[n], rounded again: float32 (M, N)."""
    per_token = not V.graph.sizevars.statically_known_equals(sympy.Mul(*x_scale.get_size()), 1)
    x_scale = L.view(x_scale, [m, 1] if per_token else [1, 1])
    y = product(product(L.to_dtype(acc, torch.float32), x_scale), w_scale)
    return y if bias is None else apply(aten.add.Tensor, y, L.to_dtype(bias, torch.float32))


def _signed_rows(x: Any, m: Any, k: int) -> Any:
    """The codes minus 128 as a realized int8 (M, K)."""
    known = _SIGNED.setdefault(V.graph, {})
    source = V.graph.current_node.args[0] if V.graph.current_node is not None else None
    if source is not None and source in known:
        return known[source]
    wide = apply(aten.sub.Tensor, L.to_dtype(x, torch.int32), ZERO_POINT_S8)
    rows = contiguous(L.view(L.to_dtype(wide, torch.int8), [m, k]))
    if source is not None:
        known[source] = rows
    return rows


def weight_rows(packed: Any) -> Any:
    """A packed weight as realized rows, (padded N, padded K) int8.

    For a weight in the layout of :func:`qinductor.gpu.lay_out` this is a view; a weight in panels,
    as CPUs want it, is copied by every call.
    """
    panels, groups, _, _ = (V.graph.sizevars.guard_int(size) for size in packed.get_size())
    rows = apply(aten.permute.default, packed, [0, 2, 1, 3])
    return contiguous(L.view(rows, [panels * PANEL, groups * K_GROUP]))


def contiguous(node: Any) -> Any:
    """The node as a buffer, or a view of one, whose rows are contiguous."""
    return ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(node))
