"""Where a kernel finds its operands."""

from __future__ import annotations

from typing import Any

import sympy
from torch._inductor import ir
from torch._inductor.codegen.cpp_template_kernel import CppTemplateKernel
from torch._inductor.codegen.cpp_utils import cexpr_index


def declare(
    kernel: CppTemplateKernel, operands: dict[str, Any], outputs: dict[str, ir.Buffer]
) -> tuple[str, dict[str, str]]:
    """Write a kernel's signature, and find the first element of each operand.

    Inductor knows a kernel's arguments by the buffer. Two operands may lie in one buffer (a scale
    that is used twice, two rows of a stacked bias), which then is one argument, and an operand may
    begin anywhere in its buffer.

    Args:
        kernel: the kernel being rendered.
        operands: name → realized, contiguous node.
        outputs: name → buffer that is written, whole.

    Returns:
        The signature, and operand or output name → C++ pointer expression.
    """
    arguments: dict[str, str] = {}
    for name, node in operands.items():
        arguments.setdefault(node.get_name(), name)
    offsets = {name: sympy.sympify(node.get_layout().offset) for name, node in operands.items()}
    signature = kernel.def_kernel(
        inputs={name: operands[name] for name in arguments.values()},
        outputs=outputs,
        extra_sizevars=list(offsets.values()),
    )
    pointers = {
        name: _plus(arguments[node.get_name()], kernel, offsets[name])
        for name, node in operands.items()
    }
    return signature, pointers | {name: name for name in outputs}


def _plus(argument: str, kernel: CppTemplateKernel, offset: sympy.Expr) -> str:
    if offset == 0:
        return argument
    return f"{argument} + {cexpr_index(kernel.rename_indexing(offset))}"
