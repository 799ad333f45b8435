"""The int8 linear layer as an Inductor C++ template.

The loop nest and the epilogue stand in ``int8_gemm.h`` and one ``int8_gemm_<isa>.h`` an instruction
set. This module writes the compile-time facts of one call (N, K, epilogue, dtypes) around them. M
stays a run-time argument, so one kernel serves every batch and length.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.codegen.cpp_template_kernel import CppTemplateKernel
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP

from ...activations import GELU_COEFFICIENTS, GELU_LIMIT, GELU_SEGMENTS_PER_UNIT
from ..base import Implementation

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


@functools.cache
def source_text(name: str) -> str:
    """Return the text of a C++ file beside this module."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def gelu_table() -> str:
    """The coefficients of :mod:`qinductor.activations` as C++ constants."""
    columns = ",\n".join(
        "{" + ", ".join(f"{value!r}f" for value in column) + "}"
        for column in zip(*GELU_COEFFICIENTS, strict=True)
    )
    return f"""\
#ifndef QINDUCTOR_GELU_TABLE
#define QINDUCTOR_GELU_TABLE
namespace qinductor {{
constexpr float kGeluLimit = {GELU_LIMIT!r}f, kGeluSegmentsPerUnit = {GELU_SEGMENTS_PER_UNIT!r}f;
alignas(64) constexpr float kGelu[5][16] = {{
{columns}
}};
}}
#endif
"""


class QLinearTemplate(CppTemplate):  # type: ignore[misc]
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

    def render(  # type: ignore[no-untyped-def]
        self,
        kernel: CppTemplateKernel,
        template_buffer_node: ir.CppTemplateBuffer | None = None,
        flag_template_buffer_has_other_users: bool | None = None,
        epilogue_nodes: Sequence[ir.IRNode] | None = None,
        **kwargs: Any,
    ) -> str:
        assert not epilogue_nodes, "config.epilogue_fusion is off: our passes fuse into arguments"
        output = template_buffer_node if template_buffer_node is not None else self.output_node
        signature = kernel.def_kernel(inputs=self.operands, outputs={"out": output})
        rows, n = output.get_size()
        k = self.operands["x"].get_size()[-1]
        m = kernel.size(output, 0)
        problem = f"Problem_{self.index}"
        arguments = ", ".join(
            (f"{name}" if name in self.operands else "nullptr") for name in OPERANDS
        )
        return f"""\
{self.header().getvalue()}
{gelu_table()}
{"".join(source_text(name) for name in self.implementation.sources)}
// {self.implementation.kernel_name}
struct {problem} {{
  using Bias = {self._ctype("bias")};
  using Residual = {self._ctype("residual")};
  using Out = {DTYPE_TO_CPP[self.layout.dtype]};
  static constexpr int64_t N = {int(n)}, K = {int(k)};
  static constexpr bool per_token = {_cpp(self.per_token)};
  static constexpr bool has_bias = {_cpp("bias" in self.operands)};
  static constexpr bool has_residual = {_cpp("residual" in self.operands)};
  static constexpr bool requantizes = {_cpp(self.layout.dtype is torch.uint8)};
  static constexpr bool out_per_channel = {_cpp(self.out_per_channel)};
  static constexpr auto activation = qinductor::Activation::{self.activation};
}};
extern "C" {signature}
{{
  {kernel.maybe_codegen_profile()}
  qinductor::gemm<qinductor::{self.implementation.cpp_class}, {problem}>(
      {{{arguments}, out}}, {m}, {ROW_LIMIT});
}}
"""

    def _ctype(self, name: str) -> str:
        node = self.operands.get(name)
        return "float" if node is None else str(DTYPE_TO_CPP[node.get_dtype()])


def _cpp(value: bool) -> str:
    return "true" if value else "false"
