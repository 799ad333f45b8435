"""The int8 linear layer whose epilogue needs whole rows, as an Inductor C++ template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch._inductor import ir
from torch._inductor.codegen.cpp_template_kernel import CppTemplateKernel
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP

from ...capability import Capability
from ..base import Implementation
from .qlinear import (
    LAST,
    PER_WEIGHT,
    SHARED,
    STAGE_SHARE,
    Epilogue,
    gemm_arguments,
    gemm_facts,
    rows,
    sizes,
    weight_operand,
)
from .template import OperatorTemplate
from .text import cpp_bool

ROW_OPERANDS = ("norm_weight", "norm_bias", "row_inverse_scale", "row_zero_point", "multiplier")
"""Operands of the C++ struct ``RowArgs``, before its outputs."""
ROW_OUTPUTS = ("kept", "codes", "scales")
"""Outputs, of which a call has some: float32 rows, uint8 codes, float32 scales."""


@dataclass(frozen=True)
class RowEpilogue:
    """What happens to a finished row; the attributes are arguments of the operator."""

    quantizer: str
    eps: float
    divisor: float
    min_scale: float
    scale_per_channel: bool


class QLinearRowsTemplate(OperatorTemplate):
    """One call of ``qinductor::qlinear_rows``.

    Args:
        implementation: which instruction set's code to write.
        operands: name → realized node.
        outputs: some of :data:`ROW_OUTPUTS` → layout with two dimensions.
        epilogue: the element-wise one.
        row_epilogue: what follows it.
    """

    operand_names = (
        *SHARED,
        *(weight_operand(name, 0) for name in PER_WEIGHT),
        *LAST,
        *ROW_OPERANDS,
        *ROW_OUTPUTS,
    )

    def __init__(
        self,
        implementation: Implementation,
        operands: dict[str, Any],
        outputs: Mapping[str, ir.Layout],
        epilogue: Epilogue,
        row_epilogue: RowEpilogue,
    ) -> None:
        super().__init__(implementation, operands, outputs)
        self.epilogue = epilogue
        self.row_epilogue = row_epilogue

    def problem(self, kernel: CppTemplateKernel) -> str:
        """See the base class."""
        row = self.row_epilogue
        norm = self.operands.get("norm_weight")
        return f"""\
{gemm_facts(self, self.epilogue, 1, "float")}
  using Norm = {"float" if norm is None else DTYPE_TO_CPP[norm.get_dtype()]};
  static constexpr bool normalizes = {cpp_bool(norm is not None)};
  static constexpr bool keeps = {cpp_bool("kept" in self.outputs)};
  static constexpr auto quantizes = qinductor::Quantizer::{row.quantizer};
  static constexpr bool encodes = {cpp_bool("codes" in self.outputs)};
  static constexpr bool multiplies = {cpp_bool("multiplier" in self.operands)};
  static constexpr bool scale_per_channel = {cpp_bool(row.scale_per_channel)};
  static constexpr float eps = {row.eps!r}f, divisor = {row.divisor!r}f, min_scale = {row.min_scale!r}f;"""  # noqa: E501

    def call(self, kernel: CppTemplateKernel, problem: str, pointers: dict[str, str]) -> str:
        """See the base class."""
        isa = f"qinductor::{self.implementation.cpp_class}"
        row_arguments = ", ".join(pointers[name] for name in (*ROW_OPERANDS, *ROW_OUTPUTS))
        n, k = sizes(self)
        limit = max(24, Capability.detect().l2 // STAGE_SHARE // (4 * n + k))
        return (
            f"qinductor::gemm_rows<{isa}, {problem}>({gemm_arguments(pointers, 1, 'nullptr')}, "
            f"{{{row_arguments}}}, {rows(kernel, self)}, {limit});"
        )

    def profile_name(self) -> str:
        """See the base class."""
        return f"{self.implementation.kernel_name}_{'_'.join(map(str, sizes(self)))}"
