"""Take away the links that refuse a gradient: a forward graph runs without them."""

from __future__ import annotations

import torch
from torch import fx

from .. import ops as _ops  # noqa: F401 - defines the operators
from ..capability import Capability
from .base import PassLog, is_call

INFERENCE_SCALE = torch.ops.qinductor.inference_scale.default


class DropInferenceScale:
    """inference_scale(scale, x) → scale.

    It links a static layer to its float input for autograd, whose graph is made before the passes
    run. Left in, it would be a second reader of every quantized tensor.
    """

    name = "drop_inference_scale"
    optional = False

    def run(self, graph: fx.Graph, capability: Capability, log: PassLog) -> None:
        """See the class."""
        for node in list(graph.nodes):
            if is_call(node, INFERENCE_SCALE):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
