"""Inductor lowering of ``torch.ops.qinductor.attention``."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor import lowering as L
from torch._inductor.virtualized import V

from ..attention import has_kernel
from ..capability import Capability
from . import TEMPLATES
from .arithmetic import apply
from .base import KERNEL_META, Implementation, choose
from .cpu.attention import AttentionTemplate
from .lowering import contiguous, has_many_elements

aten = torch.ops.aten
qinductor = torch.ops.qinductor


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
    *batch_and_length, last = q.get_size()
    width = V.graph.sizevars.guard_int(last)
    chosen = _chosen(q)
    if chosen is None or not has_kernel(width // heads):
        eager = L.fallback_handler(qinductor.attention.default, add_to_fallback_set=False)
        return eager(
            q, k, v, heads, scale, mask, causal, out_dtype, out_inverse_scale, out_zero_point
        )
    given = {"q": q, "k": k, "v": v}
    inputs = {name: _rows_in_place(node) for name, node in given.items()}
    if out_inverse_scale is not None:
        inputs["out_inverse_scale"] = contiguous(out_inverse_scale)
        inputs["out_zero_point"] = contiguous(out_zero_point)
    if mask is not None:
        inputs["mask"] = _mask_operand(mask, q, k)
    template = AttentionTemplate(
        chosen,
        inputs,
        # Head sizes are compile-time constants of the kernel; batch and lengths are not.
        ir.FixedLayout(q.get_device(), out_dtype, [*batch_and_length, width]),
        heads,
        scale,
        causal,
        out_per_channel=has_many_elements(out_inverse_scale),
    )
    return template.emit()[0]


def _chosen(q: Any) -> Implementation | None:
    """What the pass chose, which may be nothing; without our passes the machine's best."""
    if q.get_device().type != "cpu":
        return None
    node = V.graph.current_node
    if node is not None and KERNEL_META in node.meta:
        chosen: Implementation | None = node.meta[KERNEL_META]
        return chosen
    return choose(TEMPLATES["attention", "cpu"], Capability.detect())


def _rows_in_place(node: Any) -> Any:
    """A (B, S, columns) operand where it stands, if its rows follow each other at one distance."""
    realized = ir.ExternKernel.realize_input(node)
    layout = realized.maybe_get_layout()
    if isinstance(layout, ir.FixedLayout):
        (_, length, _), (batch, row, column) = layout.size, layout.stride
        same = V.graph.sizevars.statically_known_equals
        if same(column, 1) and same(batch, row * length):
            return realized
    return ir.ExternKernel.require_contiguous(realized)


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
    return contiguous(L.expand(mask, shape))
