"""Attention between int8 projections: one kernel instead of three transposes, SDPA and a copy."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import attention as _attention  # noqa: F401 - defines the operator
from ..attention import MAX_HEAD_SIZE, has_kernel
from ..capability import Capability
from ..smoothquant import attention as _padded  # noqa: F401 - defines padded_sdpa
from ..templates import TEMPLATES
from ..templates.base import choose
from .base import PassLog, Refused, argument, is_call, value

QLINEAR = torch.ops.qinductor.qlinear.default
ATTENTION = torch.ops.qinductor.attention.default
SDPA = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
PADDED = torch.ops.qinductor.padded_sdpa.default
VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
PERMUTE = torch.ops.aten.permute.default
CLONE = torch.ops.aten.clone.default
HEADS_FIRST = [0, 2, 1, 3]


class FuseAttention:
    """sdpa(heads(qlinear), heads(qlinear), heads(qlinear)) → qinductor.attention.

    The projections then write bfloat16, and the attention reads them where they stand. ``heads`` is
    the view to (B, S, H, D) and the permutation to (B, H, S, D); the result's way back is removed
    as well.
    """

    name = "fuse_attention"
    optional = True

    def run(self, graph: fx.Graph, capability: Capability, log: PassLog) -> None:
        """See the class."""
        for node in list(graph.nodes):
            if not is_call(node, SDPA, PADDED):
                continue
            try:
                kernel = self._rewrite(graph, node, capability)
            except Refused as why:
                log.add(self.name, node, "refused", str(why))
            else:
                log.add(
                    self.name,
                    node,
                    "fused",
                    f"{kernel}: one kernel on the projections' bfloat16 outputs, products in "
                    "bfloat16, sums and softmax in float32",
                )

    def _rewrite(self, graph: fx.Graph, sdpa: fx.Node, capability: Capability) -> str:
        """Replace one attention, and return the name of its kernel."""
        if value(sdpa.args[0]).device.type != "cpu":
            raise Refused(f"no kernel for device {value(sdpa.args[0]).device.type}")
        chosen = choose(TEMPLATES["attention", "cpu"], capability)
        if chosen is None:
            raise Refused("no kernel for this CPU: it needs avx512_bf16")
        plain = sdpa.target is SDPA
        if plain and argument(sdpa, "dropout_p") != 0.0:
            raise Refused("it has dropout")
        projections = [_projection(argument(sdpa, name)) for name in ("query", "key", "value")]
        result, heads = _result(sdpa)
        scale = argument(sdpa, "scale")
        size = value(projections[0]).shape[-1] // heads
        if not has_kernel(size):
            raise Refused(f"head size {size} is odd or above {MAX_HEAD_SIZE}")
        mask = argument(sdpa, "attn_mask" if plain else "mask")
        with graph.inserting_before(result):
            q, k, v = (_in_bfloat16(graph, p) for p in projections)
            new = graph.call_function(
                ATTENTION,
                (q, k, v, heads, size**-0.5 if scale is None else scale, mask),
                {"causal": plain and bool(argument(sdpa, "is_causal"))},
            )
        new.meta = {**result.meta, "nn_module_stack": sdpa.meta.get("nn_module_stack", {})}
        new.kwargs = {**new.kwargs, "out_dtype": value(result).dtype}
        result.replace_all_uses_with(new)
        graph.eliminate_dead_code()
        return chosen.kernel_name


def _in_bfloat16(graph: fx.Graph, linear: fx.Node) -> fx.Node:
    """A call of the same linear that writes bfloat16."""
    names = [arg.name for arg in linear.target._schema.arguments]
    arguments = {n: argument(linear, n) for n in names} | {"out_dtype": torch.bfloat16}
    new = graph.call_function(QLINEAR, tuple(arguments[n] for n in names))
    new.meta = {**linear.meta, "val": value(linear).to(torch.bfloat16)}
    return new


def _projection(node: Any) -> fx.Node:
    """The int8 linear whose output, seen as heads, is ``node``."""
    path = []
    for targets in ((PERMUTE,), VIEWS):
        if not is_call(node, *targets):
            raise Refused("an operand is not a projection seen as heads")
        path.append(node)
        node = node.args[0]
    if list(path[0].args[1]) != HEADS_FIRST or not is_call(node, QLINEAR):
        raise Refused("an operand is not the output of an int8 linear")
    if argument(node, "out_dtype") not in (torch.float32, torch.bfloat16):
        raise Refused(f"a projection's output is {argument(node, 'out_dtype')}")
    if any(len(n.users) != 1 for n in (*path, node)):
        raise Refused("a projection has other readers as well")
    if value(node).dim() != 3:
        raise Refused("a projection's output is not (batch, sequence, features)")
    heads, size = value(path[1]).shape[2:]
    if not _has_shape(path[1], (*value(node).shape[:2], heads, size)):
        raise Refused("a projection's rows are not one row of heads each")
    found: fx.Node = node
    return found


def _has_shape(node: fx.Node, shape: tuple[Any, ...]) -> bool:
    """True if the shapes are equal for all values of their symbols, as far as can be proved."""
    sizes = value(node).shape
    return len(sizes) == len(shape) and all(
        statically_known_true(a == b) for a, b in zip(sizes, shape, strict=True)
    )


def _result(sdpa: fx.Node) -> tuple[fx.Node, int]:
    """The node where the heads lie side by side again, and their number."""
    node = sdpa
    if sdpa.target is SDPA:
        users = list(sdpa.users)
        if len(users) != 1 or not is_call(users[0], operator.getitem) or users[0].args[1] != 0:
            raise Refused("more than the attention's output is read")
        node = users[0]
    heads = value(node).shape[1]
    if not isinstance(heads, int):
        raise Refused("the number of heads is not known")
    query, key = value(argument(sdpa, "query")), value(argument(sdpa, "key"))
    batch, _, length, size = query.shape
    keys = (batch, heads, key.shape[2], size)
    if not all(_has_shape(argument(sdpa, name), keys) for name in ("key", "value")):
        raise Refused("keys or values have another batch, number or size of heads than queries")
    steps = [(PERMUTE,), VIEWS]
    while steps:
        if len(node.users) != 1:
            raise Refused("the output is read before its heads lie side by side")
        node = next(iter(node.users))
        if is_call(node, CLONE):
            continue
        if not is_call(node, *steps.pop(0)):
            raise Refused("the output's heads are not put side by side")
        if node.target is PERMUTE and list(node.args[1]) != HEADS_FIRST:
            raise Refused("the output's heads are not put side by side")
    if not _has_shape(node, (batch, length, heads * size)):
        raise Refused("the output is not (batch, sequence, features)")
    return node, heads
