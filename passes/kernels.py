"""Name the kernel of every int8 linear, and every linear that stays in float."""

from __future__ import annotations

import torch
from torch import fx

from .. import attention as _attention  # noqa: F401 - defines the operator
from .. import fp8 as _fp8  # noqa: F401 - defines the operator
from .. import fused_ops as _fused_ops  # noqa: F401 - defines the operators
from .. import ops as _ops  # noqa: F401 - defines the operators
from ..capability import Capability
from ..templates import TEMPLATES
from ..templates.base import KERNEL_META, choose
from .base import PassLog, argument, is_call, site_of, value
from .gpu_kernels import gpu_kernel, weight_note
from .merge_projections import SITES_META

LINEARS = (
    torch.ops.qinductor.qlinear.default,
    torch.ops.qinductor.qlinear_merged.default,
    torch.ops.qinductor.qlinear_rows.default,
)
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
            if is_call(node, *LINEARS):
                self._choose(node, capability, log)
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

    def _choose(self, node: fx.Node, capability: Capability, log: PassLog) -> None:
        device = value(argument(node, "x")).device.type
        op = node.target._schema.name.removeprefix("qinductor::")
        if device == "cpu":
            chosen = choose(TEMPLATES[op, "cpu"], capability)
            assert chosen is not None, "the portable one needs nothing"
            node.meta[KERNEL_META] = chosen
            detail = f"{chosen.kernel_name}{_epilogue(node)}"
        else:
            name, reason = gpu_kernel(op, device, capability)
            detail = (
                f"eager operator: {reason}"
                if name is None
                else f"{name}{_epilogue(node)}{weight_note(node)}"
            )
        for site in node.meta.get(SITES_META, [site_of(node)]):
            log.add_at(self.name, site, "int8", detail)


def _in_linear(node: fx.Node) -> bool:
    stack = node.meta.get("nn_module_stack") or {}
    classes = [entry[1] for entry in stack.values()]
    innermost = classes[-1] if classes else None
    return innermost is torch.nn.Linear or str(innermost).endswith("torch.nn.modules.linear.Linear")


def _epilogue(node: fx.Node) -> str:
    given = {arg.name: argument(node, arg.name) for arg in node.target._schema.arguments}
    parts = ["bias"] if given["bias"] else []
    if given.get("activation", "none") != "none":
        parts.append(given["activation"])
    parts += [name for name in ("residual",) if given.get(name) is not None]
    if given.get("norm_weight") is not None:
        parts.append("layer_norm")
    made = node.meta["val"]
    outputs = [made] if isinstance(made, torch.Tensor) else made
    dtypes = ", ".join(str(output.dtype).removeprefix("torch.") for output in outputs)
    return f" ({' + '.join([*parts, f'→ {dtypes}'])})"
