"""Move what follows an int8 linear into its epilogue: activation, residual, requantization."""

from __future__ import annotations

import torch
from torch import fx

from .. import attention as _attention  # noqa: F401 - defines the operator
from .. import ops as _ops  # noqa: F401 - defines the operators
from ..capability import Capability
from .activation_patterns import Found, match_activation
from .base import PassLog, argument, is_call, replace_with, same_shape, value

QLINEAR = torch.ops.qinductor.qlinear.default
ATTENTION = torch.ops.qinductor.attention.default
QUANTIZE = torch.ops.qinductor.quantize.default
ADD = torch.ops.aten.add.Tensor
CONVERT = torch.ops.prims.convert_element_type.default


def _float32_without(node: fx.Node, *names: str) -> bool:
    """True for a float32 result of an operator that has none of the named epilogue parts yet.

    An activation or a quantizer that reads a bfloat16 tensor sees a rounded value. Skipping that
    rounding would change the result, so only float32 outputs are fused into.
    """
    unset = ("none", None)
    return argument(node, "out_dtype") is torch.float32 and all(
        argument(node, name) in unset for name in names
    )


class FuseActivation:
    """activation(qlinear(x)) → qlinear(x, activation=…)."""

    name = "fuse_activation"
    optional = True

    def run(self, graph: fx.Graph, capability: Capability, log: PassLog) -> None:
        """See the class."""
        for node in list(graph.nodes):
            if not is_call(node, QLINEAR):
                continue
            found = match_activation(node) or self._of_widened(node)
            if found is None:
                continue
            if not _float32_without(node, "activation", "residual"):
                log.add(
                    self.name,
                    node,
                    "refused",
                    f"{found.name} reads a {argument(node, 'out_dtype')} tensor, whose rounding is "
                    "part of the result",
                )
                continue
            if found.read_elsewhere:
                log.add(self.name, node, "refused", f"the input of {found.name} has other readers")
                continue
            replace_with(graph, found.output, node, activation=found.name)
            graph.eliminate_dead_code()
            log.add(self.name, node, "fused", f"{found.name} in the epilogue")

    @staticmethod
    def _of_widened(node: fx.Node) -> Found | None:
        """An activation of a 16-bit output, whose decomposition computes in float32."""
        widened = (u for u in node.users if is_call(u, CONVERT) and value(u).dtype is torch.float32)
        return next((f for u in widened if (f := match_activation(u)) is not None), None)


class FuseResidual:
    """qlinear(x) + r → qlinear(x, residual=r), for r of the same shape."""

    name = "fuse_residual"
    optional = True

    def run(self, graph: fx.Graph, capability: Capability, log: PassLog) -> None:
        """See the class."""
        for node in list(graph.nodes):
            if not is_call(node, ADD) or node.kwargs.get("alpha", 1) != 1:
                continue
            # The later linear of two takes the other one's output as its residual.
            operands = [a for a in reversed(node.args) if isinstance(a, fx.Node)]
            linear = next((a for a in operands if is_call(a, QLINEAR)), None)
            if linear is None or len(operands) != 2:
                continue
            other = operands[1] if operands[0] is linear else operands[0]
            reason = self._reason_against(node, linear, other)
            if reason is not None:
                log.add(self.name, linear, "refused", reason)
                continue
            replace_with(graph, node, linear, residual=other)
            graph.erase_node(linear)
            log.add(self.name, linear, "fused", "residual addition in the epilogue")

    @staticmethod
    def _reason_against(add: fx.Node, linear: fx.Node, other: fx.Node) -> str | None:
        if len(linear.users) != 1 or other is linear:
            return "the sum is not the only reader of the linear's output"
        if not _float32_without(linear, "residual"):
            return f"output is {argument(linear, 'out_dtype')} or has a residual already"
        if not same_shape(linear, other):
            return (
                f"addend has shape {tuple(value(other).shape)}, not the output's "
                f"{tuple(value(linear).shape)}"
            )
        if value(other).dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"addend is {value(other).dtype}"
        if value(add).dtype is not torch.float32:
            return f"the sum is {value(add).dtype}"
        return None


class FuseRequantize:
    """quantize(f(x), s, z) → f(x, out_dtype=uint8, …) for an int8 linear or attention f."""

    name = "fuse_requantize"
    optional = True

    def run(self, graph: fx.Graph, capability: Capability, log: PassLog) -> None:
        """See the class."""
        for node in list(graph.nodes):
            if not is_call(node, QUANTIZE):
                continue
            linear = node.args[0]
            if not is_call(linear, QLINEAR, ATTENTION):
                continue
            if len(linear.users) != 1:
                log.add(self.name, linear, "refused", "the float output has other readers as well")
                continue
            if not _float32_without(linear):
                log.add(
                    self.name,
                    linear,
                    "refused",
                    f"output is {argument(linear, 'out_dtype')}, whose rounding is part of the "
                    "result",
                )
                continue
            replace_with(
                graph,
                node,
                linear,
                out_dtype=torch.uint8,
                out_inverse_scale=argument(node, "inverse_scale"),
                out_zero_point=argument(node, "zero_point"),
            )
            graph.erase_node(linear)
            log.add(self.name, linear, "fused", "requantized to u8 in the epilogue")
