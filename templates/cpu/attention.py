"""Attention between int8 projections as an Inductor C++ template."""

from __future__ import annotations

from typing import Any

from torch._inductor import ir
from torch._inductor.codegen.cpp_template_kernel import CppTemplateKernel
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP

from ..base import Implementation
from .template import OperatorTemplate, is_uint8
from .text import cpp_bool


class AttentionTemplate(OperatorTemplate):
    """One call of ``qinductor::attention``.

    Args:
        implementation: which instruction set's code to write.
        operands: name → realized node. Queries, keys and values may be columns of a wider tensor:
            a row begins a constant number of elements after the one before it.
        layout: of the output, (B, Sq, heads * D) contiguous.
        heads, scale, causal: as in the operator.
        out_per_channel: ``out_inverse_scale`` has one element a column.
    """

    operand_names = ("q", "k", "v", "mask", "out_inverse_scale", "out_zero_point")

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
        super().__init__(implementation, operands, {"out": layout})
        self.heads = heads
        self.scale = scale
        self.causal = causal
        self.out_per_channel = out_per_channel

    def problem(self, kernel: CppTemplateKernel) -> str:
        """See the base class."""
        width = int(self.layout.size[-1])
        return f"""\
  using Out = {DTYPE_TO_CPP[self.layout.dtype]};
  static constexpr int64_t H = {self.heads}, D = {width // self.heads};
  static constexpr float scale = {self.scale!r}f;
  static constexpr bool has_mask = {cpp_bool("mask" in self.operands)};
  static constexpr bool causal = {cpp_bool(self.causal)};
  static constexpr bool requantizes = {cpp_bool(is_uint8(self.layout))};
  static constexpr bool out_per_channel = {cpp_bool(self.out_per_channel)};"""

    def call(self, kernel: CppTemplateKernel, problem: str, pointers: dict[str, str]) -> str:
        """See the base class."""
        q, k = self.operands["q"], self.operands["k"]
        mask_strides = ["0", "0", "0"]
        if (mask := self.operands.get("mask")) is not None:
            # A broadcast dimension is read again and again: stride 0.
            mask_strides = [
                "0" if mask.get_size()[d] == 1 else kernel.stride(mask, d) for d in range(3)
            ]
        sizes = ", ".join(
            [
                kernel.size(q, 0),
                kernel.size(q, 1),
                kernel.size(k, 1),
                *(kernel.stride(self.operands[name], 1) for name in ("q", "k", "v")),
                *mask_strides,
            ]
        )
        arguments = ", ".join(pointers[name] for name in (*self.operand_names, "out"))
        return (
            f"qinductor::{self.implementation.cpp_class}::run<{problem}>"
            f"({{{arguments}}}, {{{sizes}}});"
        )
