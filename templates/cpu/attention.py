"""Attention between int8 projections as an Inductor C++ template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.codegen.cpp_template_kernel import CppTemplateKernel
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP

from ..base import Implementation
from .arguments import declare
from .text import cpp_bool, gelu_table, sources

OPERANDS = ("q", "k", "v", "mask", "out_inverse_scale", "out_zero_point")
"""Names of the kernel's tensor arguments, in the order of the C++ struct ``AttentionArgs``."""


class AttentionTemplate(CppTemplate):
    """One call of ``qinductor::attention``.

    Args:
        implementation: which instruction set's code to write.
        operands: name (of :data:`OPERANDS`) → realized node; absent optional ones are left out.
        layout: of the output, (B, Sq, heads * D) contiguous.
        heads, scale, causal: as in the operator.
        out_per_channel: ``out_inverse_scale`` has one element a column.
    """

    def __init__(
        self,
        implementation: Implementation,
        operands: dict[str, Any],
        layout: ir.Layout,
        heads: int,
        scale: float,
        causal: bool,
        out_per_channel: bool,
    ) -> None:
        # The number of threads is read when the kernel runs; this one is only Inductor's hint.
        super().__init__("qinductor_attention", list(operands.values()), layout, num_threads=1)
        self.implementation = implementation
        self.operands = operands
        self.heads = heads
        self.scale = scale
        self.causal = causal
        self.out_per_channel = out_per_channel

    def render(  # type: ignore[override]
        self,
        kernel: CppTemplateKernel,
        template_buffer_node: ir.CppTemplateBuffer | None = None,
        flag_template_buffer_has_other_users: bool | None = None,
        epilogue_nodes: Sequence[ir.IRNode] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the kernel's C++ text."""
        assert not epilogue_nodes, "config.epilogue_fusion is off: our passes fuse into arguments"
        output: Any = template_buffer_node if template_buffer_node is not None else self.output_node
        signature, pointers = declare(kernel, self.operands, output)
        width = int(output.get_size()[-1])
        # Named by the kernel, so that equal layers have equal texts and share one kernel.
        problem = f"Problem_{kernel.kernel_name}"
        arguments = ", ".join(pointers.get(name, "nullptr") for name in OPERANDS)
        mask_strides = ["0", "0", "0"]
        if (mask := self.operands.get("mask")) is not None:
            # A broadcast dimension is read again and again: stride 0.
            mask_strides = [
                "0" if mask.get_size()[d] == 1 else kernel.stride(mask, d) for d in range(3)
            ]
        sizes = ", ".join(
            [
                kernel.size(output, 0),
                kernel.size(output, 1),
                kernel.size(self.operands["k"], 1),
                *mask_strides,
            ]
        )
        return f"""\
{self.header().getvalue()}
{gelu_table()}
{sources(self.implementation)}
// {self.implementation.kernel_name}
struct {problem} {{
  using Out = {DTYPE_TO_CPP[self.layout.dtype]};
  static constexpr int64_t H = {self.heads}, D = {width // self.heads};
  static constexpr float scale = {self.scale!r}f;
  static constexpr bool has_mask = {cpp_bool("mask" in self.operands)};
  static constexpr bool causal = {cpp_bool(self.causal)};
  static constexpr bool requantizes = {cpp_bool(self.layout.dtype is torch.uint8)};
  static constexpr bool out_per_channel = {cpp_bool(self.out_per_channel)};
}};
extern "C" {signature}
{{
  {kernel.maybe_codegen_profile(self.implementation.kernel_name)}
  qinductor::{self.implementation.cpp_class}::run<{problem}>({{{arguments}, out}}, {{{sizes}}});
}}
"""
