"""The int8 linear layer as an Inductor C++ template.

The loop nest and the epilogue stand in ``int8_gemm.h`` and one ``int8_gemm_<isa>.h`` an instruction
set. This module writes the compile-time facts of one call (N, K, epilogue, dtypes) around them. M
stays a run-time argument, so one kernel serves every batch and length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.codegen.cpp_template_kernel import CppTemplateKernel
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP
from torch._inductor.virtualized import V

from ..base import Implementation
from .arguments import declare
from .text import cpp_bool, gelu_table, sources

ROW_LIMIT = 384
"""Most rows of one block. Measured at M = 1024, N and K of 768 and 3072: 192 to 516 rows run within
2 % of each other; fewer read the weights more often."""

OPERANDS = (
    "x",
    "x_scale",
    "x_zero_point",
    "packed",
    "w_scale",
    "w_sum",
    "bias",
    "residual",
    "out_inverse_scale",
    "out_zero_point",
)
"""Names of the kernel's tensor arguments, in the order of the C++ struct ``Args``."""


class QLinearTemplate(CppTemplate):
    """One call of ``qinductor::qlinear``.

    Args:
        implementation: which instruction set's code to write.
        operands: name (of :data:`OPERANDS`) → realized node; absent optional ones are left out.
        layout: of the output, (M, N) contiguous.
        activation: name of the activation.
        per_token: ``x_scale`` has one element a row.
        out_per_channel: ``out_inverse_scale`` has one element a column.
    """

    def __init__(
        self,
        implementation: Implementation,
        operands: dict[str, ir.IRNode],
        layout: ir.Layout,
        activation: str,
        per_token: bool,
        out_per_channel: bool,
    ) -> None:
        # The number of threads is read when the kernel runs; this one is only Inductor's hint.
        super().__init__("qinductor_qlinear", list(operands.values()), layout, num_threads=1)
        self.implementation = implementation
        self.operands = operands
        self.activation = activation
        self.per_token = per_token
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
        m = kernel.size(output, 0)
        # Facts by now, though a layout may still spell them as the symbols they were.
        sizes = (output.get_size()[1], self.operands["x"].get_size()[1])
        n, k = (V.graph.sizevars.guard_int(size) for size in sizes)
        # Inductor puts the kernel's name in: equal layers have equal texts and share one kernel,
        # and under cpp_wrapper, which writes all kernels into one file, the names differ.
        problem = f"Problem_{kernel.kernel_name}"
        arguments = ", ".join(pointers.get(name, "nullptr") for name in OPERANDS)
        return f"""\
{self.header().getvalue()}
{gelu_table()}
{sources(self.implementation)}
// {self.implementation.kernel_name}
struct {problem} {{
  using Bias = {self._ctype("bias")};
  using Residual = {self._ctype("residual")};
  using Out = {DTYPE_TO_CPP[self.layout.dtype]};
  static constexpr int64_t N = {n}, K = {k};
  static constexpr bool per_token = {cpp_bool(self.per_token)};
  static constexpr bool has_bias = {cpp_bool("bias" in self.operands)};
  static constexpr bool has_residual = {cpp_bool("residual" in self.operands)};
  static constexpr bool requantizes = {cpp_bool(self.layout.dtype is torch.uint8)};
  static constexpr bool out_per_channel = {cpp_bool(self.out_per_channel)};
  static constexpr auto activation = qinductor::Activation::{self.activation};
}};
extern "C" {signature}
{{
  {kernel.maybe_codegen_profile(f"{self.implementation.kernel_name}_{n}_{k}")}
  qinductor::gemm<qinductor::{self.implementation.cpp_class}, {problem}>(
      {{{arguments}, out}}, {m}, {ROW_LIMIT});
}}
"""

    def _ctype(self, name: str) -> str:
        node = self.operands.get(name)
        return "float" if node is None else str(DTYPE_TO_CPP[node.get_dtype()])
