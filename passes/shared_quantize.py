"""Quantize a tensor once for all the linears that read it with the same scale."""

from __future__ import annotations

import operator

import torch
from torch import fx

from .. import ops as _ops  # noqa: F401 - defines the operators
from ..capability import Capability
from .base import PassLog, is_call

QUANTIZERS = (
    torch.ops.qinductor.quantize.default,
    torch.ops.qinductor.quantize_per_token.default,
)


class ShareQuantize:
    """Merge quantizers with equal arguments.

    Equal means the same graph nodes: linears that :func:`qinductor.convert` put in one group hold
    the same scale tensor. Two tensors with equal contents are two nodes, and stay apart.
    """

    name = "share_quantize"
    optional = True

    def run(self, graph: fx.Graph, capability: Capability, log: PassLog) -> None:
        """See the class."""
        seen: dict[tuple[object, ...], fx.Node] = {}
        for node in list(graph.nodes):
            if not is_call(node, *QUANTIZERS):
                continue
            key = (node.target, node.args, tuple(sorted(node.kwargs.items())))
            first = seen.setdefault(key, node)
            if first is not node:
                log.add(self.name, node, "fused", "shares the quantized input of its group")
                node.replace_all_uses_with(first)
                graph.erase_node(node)
        for first in seen.values():
            _share_items(graph, first)


def _share_items(graph: fx.Graph, quantizer: fx.Node) -> None:
    """One node for each output of a quantizer that has several: later passes compare nodes."""
    items: dict[int, fx.Node] = {}
    for user in list(quantizer.users):
        if is_call(user, operator.getitem):
            first = items.setdefault(user.args[1], user)
            if first is not user:
                user.replace_all_uses_with(first)
                graph.erase_node(user)
