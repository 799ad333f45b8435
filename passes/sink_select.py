"""Compute only the rows that are read: a select of one position moves before row-wise operators."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import attention as _attention  # noqa: F401 - defines the operator
from .. import ops as _ops  # noqa: F401 - defines the operators
from ..capability import Capability
from .base import PassLog, argument, is_call, value

QLINEAR = torch.ops.qinductor.qlinear.default
ATTENTION = torch.ops.qinductor.attention.default
SELECT = torch.ops.aten.select.int
SLICE = torch.ops.aten.slice.Tensor

ROW_ARGUMENTS = {
    QLINEAR: ("x", "x_scale", "residual"),
    ATTENTION: ("q", "mask"),
    torch.ops.qinductor.quantize.default: ("x",),
    torch.ops.qinductor.quantize_per_token.default: ("x",),
}
"""Operator → arguments that have a row for each row of the result."""

REDUCTIONS = (
    torch.ops.aten.var_mean.correction,
    torch.ops.aten.mean.dim,
    torch.ops.aten.sum.dim_IntList,
    torch.ops.aten.amax.default,
)


class SinkSelect:
    """select(f(x), 1, i) → select(f(slice(x, 1, i)), 1, 0) for everything row-wise between them.

    A classifier reads position 0 of the last layer. What lies between that layer's keys and values
    and the select then runs on one row a sequence.
    """

    name = "sink_select"
    optional = True

    def run(self, graph: fx.Graph, capability: Capability, log: PassLog) -> None:
        """See the class."""
        for select in list(graph.nodes):
            if not is_call(select, SELECT) or value(select.args[0]).dim() != 3:
                continue
            source, dim, index = select.args
            length = value(source).shape[1]
            if dim not in (1, -2) or statically_known_true(length == 1):
                continue
            region = _region(graph, source, length)
            linears = [n for n in region if n.target is QLINEAR]
            if not linears:
                continue
            if not isinstance(index, int) or (index < 0 and not isinstance(length, int)):
                log.add(self.name, source, "refused", f"position {index} is not known")
                continue
            if any(user is not select and user not in region for user in source.users):
                log.add(self.name, source, "refused", "all positions of it are read elsewhere")
                continue
            for linear in linears:
                log.add(self.name, linear, "fused", "computes the one position that is read")
            _sink(graph, select, region, index if index >= 0 else index + length, length)


def _region(graph: fx.Graph, source: fx.Node, length: Any) -> list[fx.Node]:
    """Row-wise nodes that nothing but ``source``'s select reads, in the graph's order."""
    region: dict[fx.Node, None] = {}
    reached = False
    for node in reversed(list(graph.nodes)):
        reached = reached or node is source
        if not reached or node.op != "call_function" or not _is_row_wise(node, length):
            continue
        outside = [u for u in node.users if u not in region or not _reads_rows(u, node)]
        if node is source:
            outside = [u for u in outside if not is_call(u, SELECT)]
        elif not node.users:
            continue
        if not outside:
            region[node] = None
        elif node is source:
            return []
    # An output of an operator that computes all rows is sliced, like any other input.
    whole = [n for n in region if n.target is operator.getitem and n.args[0] not in region]
    nodes = [n for n in reversed(region) if n not in whole]
    return nodes if source in nodes else []


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _has_rows(tensor: Tensor, length: Any) -> bool:
    return tensor.dim() >= 2 and statically_known_true(tensor.shape[-2] == length)


def _fits(node: fx.Node, length: Any) -> bool:
    """True for an argument that can be read at one row: it has all rows, or one for all of them."""
    tensor = value(node)
    return (
        tensor.dim() < 2
        or _has_rows(tensor, length)
        or statically_known_true(tensor.shape[-2] == 1)
    )


def _is_row_wise(node: fx.Node, length: Any) -> bool:
    """True if row i of the result needs row i of the arguments that have rows, and no other."""
    made = node.meta.get("val")
    outputs = [made] if isinstance(made, Tensor) else made
    if not isinstance(outputs, (tuple, list)) or not all(
        isinstance(output, Tensor) and _has_rows(output, length) for output in outputs
    ):
        return False
    if node.target is operator.getitem:
        return True  # its producer is asked as well: see _region
    if not all(map(_is_tensor, node.all_input_nodes)):
        return False
    if not all(_fits(arg, length) for arg in _row_arguments(node)):
        return False
    if node.target is ATTENTION:
        return not argument(node, "causal")
    if node.target is QLINEAR:
        scale = value(argument(node, "x_scale"))
        return scale.dim() < 2 or scale.dim() == value(argument(node, "x")).dim()
    if node.target in ROW_ARGUMENTS:
        return True
    if node.target in REDUCTIONS:
        last = value(node.args[0]).dim() - 1
        dims = argument(node, "dim") or ()
        return bool(argument(node, "keepdim")) and list(dims) in ([-1], [last])
    return isinstance(node.target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in node.target.tags
        and all(value(arg).dim() <= 3 for arg in node.all_input_nodes)
    )


def _row_arguments(node: fx.Node) -> list[fx.Node]:
    """Arguments of which a row is taken where they have rows."""
    if node.target in ROW_ARGUMENTS:
        given = (argument(node, name) for name in ROW_ARGUMENTS[node.target])
        return [a for a in given if isinstance(a, fx.Node)]
    return list(node.all_input_nodes)


def _reads_rows(user: fx.Node, node: fx.Node) -> bool:
    """True if row i of ``user`` reads of ``node`` row i alone: keys and values are read whole."""
    if user.target not in ROW_ARGUMENTS:
        return True
    assert isinstance(user.target, torch._ops.OpOverload)
    names = {arg.name for arg in user.target._schema.arguments} - set(ROW_ARGUMENTS[user.target])
    return all(argument(user, name) is not node for name in names)


def _sink(graph: fx.Graph, select: fx.Node, region: list[fx.Node], index: int, length: Any) -> None:
    """Copy the region onto one row, and read that."""
    one: dict[fx.Node, fx.Node] = {}
    for node in region:
        with graph.inserting_before(node):
            for arg in _row_arguments(node):
                if arg not in one and _is_tensor(arg) and _has_rows(value(arg), length):
                    dim = value(arg).dim() - 2
                    one[arg] = graph.call_function(SLICE, (arg, dim, index, index + 1))
                    one[arg].meta = {**arg.meta, "val": _shrunk(value(arg))}
            rows = set(_row_arguments(node))
            new = graph.node_copy(node, lambda a, rows=rows: one.get(a, a) if a in rows else a)
        made = node.meta["val"]
        new.meta["val"] = (
            _shrunk(made) if isinstance(made, Tensor) else type(made)(map(_shrunk, made))
        )
        one[node] = new
    with graph.inserting_before(select):
        first = graph.call_function(SELECT, (one[select.args[0]], 1, 0))
    first.meta = dict(select.meta)
    select.replace_all_uses_with(first)
    graph.eliminate_dead_code()


def _shrunk(tensor: Tensor) -> Tensor:
    """A fake of the same kind with one row."""
    shape = list(tensor.shape)
    shape[-2] = 1
    return tensor.new_empty(shape)
