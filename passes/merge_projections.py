"""One int8 GEMM for the projections of an attention that read the same codes."""

from __future__ import annotations

import torch
from torch import fx

from .. import attention as _attention  # noqa: F401 - defines the operator
from .. import fused_ops as _fused_ops  # noqa: F401 - defines the operators
from ..capability import Capability
from .base import PassLog, argument, is_call, site_of, value

QLINEAR = torch.ops.qinductor.qlinear.default
MERGED = torch.ops.qinductor.qlinear_merged.default
ATTENTION = torch.ops.qinductor.attention.default
SLICE = torch.ops.aten.slice.Tensor
PER_WEIGHT = ("packed", "w_scale", "w_sum", "bias")

SITES_META = "qinductor_sites"
"""Key of a merged linear's ``node.meta``: the sites of the linears it stands for, in order."""


class MergeProjections:
    """attention(qlinear(x), qlinear(x), qlinear(x)) → attention of slices of qlinear_merged(x).

    The weights stay where they are: the kernel takes a list of them. The attention reads its
    operands as columns of the one output.
    """

    name = "merge_projections"
    optional = True

    def run(self, graph: fx.Graph, capability: Capability, log: PassLog) -> None:
        """See the class."""
        for node in list(graph.nodes):
            if not is_call(node, ATTENTION):
                continue
            projections = [p for p in dict.fromkeys(node.args[:3]) if is_call(p, QLINEAR)]
            groups: dict[tuple[object, ...], list[fx.Node]] = {}
            for projection in projections:
                groups.setdefault(_input_of(projection), []).append(projection)
            for group in groups.values():
                if len(projections) < 2 or (len(group) < 2 and len(groups) < len(projections)):
                    continue  # the queries of a cross-attention, or of one position, stand alone
                if len(group) < 2:
                    log.add(self.name, group[0], "refused", "no other projection reads its codes")
                elif (reason := _reason_against(group)) is not None:
                    log.add(self.name, group[0], "refused", reason)
                else:
                    _merge(graph, node, group)
                    for projection in group:
                        detail = f"one GEMM for {len(group)} projections of the same codes"
                        log.add(self.name, projection, "fused", detail)


def _input_of(linear: fx.Node) -> tuple[object, ...]:
    names = ("x", "x_scale", "x_zero_point", "out_dtype")
    return tuple(argument(linear, name) for name in names)


def _reason_against(group: list[fx.Node]) -> str | None:
    """Why these linears cannot be one; None if they can."""
    if value(group[0]).device.type != "cpu":
        return f"no merged kernel for device {value(group[0]).device.type}"
    if any(len(linear.users) != 1 for linear in group):
        return "a projection has other readers as well"
    widths = [value(argument(linear, "w_scale")).shape[0] for linear in group]
    if len(set(widths)) != 1:
        return f"the projections have {' and '.join(map(str, widths))} outputs"
    if len({argument(linear, "bias") is None for linear in group}) != 1:
        return "some of the projections have a bias and some have none"
    if len({value(b).dtype for linear in group if (b := argument(linear, "bias"))}) > 1:
        return "the projections' biases have different dtypes"
    plain = {"activation": "none", "residual": None, "out_inverse_scale": None}
    if any(argument(linear, n) != unset for linear in group for n, unset in plain.items()):
        return "a projection has an epilogue of its own"
    return None


def _merge(graph: fx.Graph, attention: fx.Node, group: list[fx.Node]) -> None:
    x, x_scale, x_zero_point, out_dtype = _input_of(group[0])
    lists = [[argument(linear, name) for linear in group] for name in PER_WEIGHT]
    if lists[-1][0] is None:
        lists[-1] = []
    width = value(group[0]).shape[-1]
    last = value(group[0]).dim() - 1
    with graph.inserting_before(attention):
        merged = graph.call_function(MERGED, (x, x_scale, x_zero_point, *lists, out_dtype))
        like = value(group[0])
        merged.meta = {
            **group[0].meta,
            "val": like.new_empty((*like.shape[:-1], width * len(group))),
            SITES_META: [site_of(linear) for linear in group],
        }
        for index, linear in enumerate(group):
            columns = graph.call_function(SLICE, (merged, last, index * width, (index + 1) * width))
            columns.meta = {**linear.meta, "val": value(linear)}
            linear.replace_all_uses_with(columns)
            graph.erase_node(linear)
