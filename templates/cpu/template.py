"""What the C++ templates of this package have in common."""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.codegen.cpp_template_kernel import CppTemplateKernel
from torch._inductor.utils import Placeholder

from ..base import Implementation
from .arguments import declare
from .text import sources, tables


class OperatorTemplate(CppTemplate, abc.ABC):
    """One call of an operator, as C++ text around the files of an implementation.

    A subclass writes :meth:`problem`, a struct of compile-time facts, and :meth:`call`.

    Args:
        implementation: which instruction set's code to write.
        operands: name → realized node; absent optional ones are left out.
        outputs: name → layout, contiguous.
    """

    def __init__(
        self,
        implementation: Implementation,
        operands: dict[str, Any],
        outputs: Mapping[str, ir.Layout],
    ) -> None:
        first = next(iter(outputs.values()))
        # The number of threads is read when the kernel runs; this one is only Inductor's hint.
        super().__init__(
            f"qinductor_{implementation.op}", list(operands.values()), first, num_threads=1
        )
        self.implementation = implementation
        self.operands = operands
        self.outputs = outputs

    @property
    @abc.abstractmethod
    def operand_names(self) -> tuple[str, ...]:
        """Names of the kernel's tensor arguments, present or not."""

    @abc.abstractmethod
    def problem(self, kernel: CppTemplateKernel) -> str:
        """Return the members of the struct of compile-time facts."""

    @abc.abstractmethod
    def call(self, kernel: CppTemplateKernel, problem: str, pointers: dict[str, str]) -> str:
        """Return the kernel's one statement.

        Args:
            kernel: the kernel being rendered.
            problem: name of the struct.
            pointers: operand or output name → C++ expression; ``nullptr`` for absent ones.
        """

    def emit(self) -> list[ir.TensorBox]:
        """Put the call into the graph being lowered, and return its outputs."""

        def make_kernel_render(
            node: ir.CppTemplateBuffer,
            flag_template_buffer_has_other_users: bool,
            epilogue_nodes: Sequence[ir.IRNode] | None = None,
        ) -> tuple[CppTemplateKernel, Any]:
            assert not epilogue_nodes, "config.epilogue_fusion is off: passes fuse into arguments"
            kernel = CppTemplateKernel(kernel_name=str(Placeholder.KERNEL_NAME), num_threads=1)
            return kernel, functools.partial(kernel.render, self, node=node)

        inputs: list[Any] = list(self.operands.values())
        # The choice is read by Inductor's own autotuning only, which this buffer never enters.
        template: Any = self  # Inductor's annotation is of another kind of template
        buffer = ir.CppTemplateBuffer(self.layout, inputs, make_kernel_render, template, None)
        if len(self.outputs) == 1:
            return [ir.TensorBox.create(buffer)]
        outputs = [
            ir.MultiOutput(layout, buffer, [(list, index)])
            for index, layout in enumerate(self.outputs.values())
        ]
        buffer.layout = ir.MultiOutputLayout(device=self.layout.device)
        buffer.outputs = list(outputs)
        return [ir.TensorBox.create(output) for output in outputs]

    def render(  # type: ignore[override]
        self, kernel: CppTemplateKernel, node: ir.CppTemplateBuffer, **kwargs: Any
    ) -> str:
        """Return the kernel's C++ text."""
        buffers = node.outputs if len(self.outputs) > 1 else [node]
        assert buffers is not None
        signature, found = declare(
            kernel, self.operands, dict(zip(self.outputs, buffers, strict=True))
        )
        pointers = dict.fromkeys(self.operand_names, "nullptr") | found
        # Inductor puts the kernel's name in: equal layers have equal texts and share one kernel,
        # and under cpp_wrapper, which writes all kernels into one file, the names differ.
        problem = f"Problem_{kernel.kernel_name}"
        return f"""\
{self.header().getvalue()}
{tables()}
{sources(self.implementation)}
// {self.implementation.kernel_name}
struct {problem} {{
{self.problem(kernel)}
}};
extern "C" {signature}
{{
  {kernel.maybe_codegen_profile(self.profile_name())}
  {self.call(kernel, problem, pointers)}
}}
"""

    def profile_name(self) -> str:
        """Name under which Inductor's kernel profile lists the kernel."""
        return self.implementation.kernel_name


def is_uint8(layout: ir.Layout) -> bool:
    """True for an output of codes."""
    return bool(layout.dtype is torch.uint8)
