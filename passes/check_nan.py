"""Look for NaN in what is going to be quantized."""

from __future__ import annotations

import torch
from torch import fx

from .. import ops as _ops  # noqa: F401 - defines the operators
from ..capability import Capability
from .base import PassLog, is_call, site_of, value
from .shared_quantize import QUANTIZERS

CHECK = torch.ops.qinductor.check_nan.default


class CheckNan:
    """quantize(x) → quantize(check_nan(x)), which raises, naming the site.

    A code is an integer, so a NaN that reaches a quantizer is lost. The check reads the float
    tensor, which therefore is computed: the quantizer is not fused into what produces it.
    """

    name = "check_nan"
    optional = False

    def run(self, graph: fx.Graph, capability: Capability, log: PassLog) -> None:
        """See the class."""
        for node in list(graph.nodes):
            if not is_call(node, *QUANTIZERS):
                continue
            x = node.args[0]
            with graph.inserting_before(node):
                checked = graph.call_function(CHECK, (x, site_of(node)))
            checked.meta = {**x.meta, "val": torch.empty_like(value(x))}
            node.args = (checked, *node.args[1:])
            log.add(self.name, node, "checked", "the quantizer's input is checked for NaN")
