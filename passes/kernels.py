"""Name the kernel of every int8 linear, and every linear that stays in float."""

from __future__ import annotations

import torch
from torch import fx

from .. import attention as _attention  # noqa: F401 - defines the operator
from .. import fp8 as _fp8  # noqa: F401 - defines the operator
from .. import ops as _ops  # noqa: F401 - defines the operators
from ..capability import Capability
from ..templates import TEMPLATES
from ..templates.base import KERNEL_META, choose
from .base import PassLog, argument, is_call, value
from .gpu_kernels import gpu_kernel, weight_note

QLINEAR = torch.ops.qinductor.qlinear.default
ATTENTION = torch.ops.qinductor.attention.default
FP8_LINEAR = torch.ops.qinductor.fp8_linear.default
FLOAT_MATMULS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
)


class ChooseKernels:
    """Choose the template of each int8 linear.

    It cannot be disabled: it is what the report lists.
    """

    name = "choose_kernels"
    optional = False

    def run(self, graph: fx.Graph, capability: Capability, log: PassLog) -> None:
        """See the class."""
        for node in graph.nodes:
            if is_call(node, QLINEAR):
                device = value(node).device.type
                if device == "cpu":
                    chosen = choose(TEMPLATES["qlinear", "cpu"], capability)
                    assert chosen is not None, "the portable one needs nothing"
                    node.meta[KERNEL_META] = chosen
                    detail = f"{chosen.kernel_name}{_epilogue(node)}"
                else:
                    name, reason = gpu_kernel("qlinear", device, capability)
                    detail = (
                        f"eager operator: {reason}"
                        if name is None
                        else f"{name}{_epilogue(node)}{weight_note(node)}"
                    )
                log.add(self.name, node, "int8", detail)
            elif is_call(node, FP8_LINEAR):
                name, reason = gpu_kernel("fp8_linear", value(node).device.type, capability)
                if name is None:
                    log.add(self.name, node, "refused", f"fp8 linear as eager operator: {reason}")
                else:
                    log.add(self.name, node, "fused", name)
            elif is_call(node, ATTENTION):
                node.meta[KERNEL_META] = choose(TEMPLATES["attention", "cpu"], capability)
            elif is_call(node, *FLOAT_MATMULS) and _in_linear(node):
                log.add(self.name, node, "kept", f"{value(node).dtype} matmul: no int8 weight")


def _in_linear(node: fx.Node) -> bool:
    stack = node.meta.get("nn_module_stack") or {}
    classes = [entry[1] for entry in stack.values()]
    innermost = classes[-1] if classes else None
    return innermost is torch.nn.Linear or str(innermost).endswith("torch.nn.modules.linear.Linear")


def _epilogue(node: fx.Node) -> str:
    parts = [
        name
        for name, present in (
            ("bias", argument(node, "bias") is not None),
            (str(argument(node, "activation")), argument(node, "activation") != "none"),
            ("residual", argument(node, "residual") is not None),
        )
        if present
    ]
    out = str(argument(node, "out_dtype")).removeprefix("torch.")
    return f" ({' + '.join([*parts, f'→ {out}'])})"
