"""The int8 linear layers as Inductor C++ templates.

The loop nest and the epilogue stand in ``int8_gemm.h`` and one ``int8_gemm_<isa>.h`` an instruction
set. This module writes the compile-time facts of one call (N, K, epilogue, dtypes) around them. M
stays a run-time argument, so one kernel serves every batch and length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch._inductor import ir
from torch._inductor.codegen.cpp_template_kernel import CppTemplateKernel
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP
from torch._inductor.virtualized import V

from ..base import Implementation
from .template import OperatorTemplate, is_uint8
from .text import cpp_bool

ROW_LIMIT = 384
"""Most rows of one block. Measured at M = 1024, N and K of 768 and 3072: 192 to 516 rows run within
2 % of each other; fewer read the weights more often."""

STAGE_SHARE = 3
"""A block of whole rows, float32 outputs and inputs, takes at most L2 / this: the panel in use, the
next one and the residual need room too. Measured: 24 to 96 rows of 768 and 3072 columns run within
5 % of each other; what does not fit L2 costs 10 %."""

SHARED = ("x", "x_scale", "x_zero_point")
PER_WEIGHT = ("packed", "w_scale", "w_sum", "bias")
LAST = ("residual", "out_inverse_scale", "out_zero_point")


def weight_operand(name: str, index: int) -> str:
    """Name of operand ``name`` of one of several weights."""
    return f"{name}_{index}"


@dataclass(frozen=True)
class Epilogue:
    """What a kernel does with its sums.

    Attributes:
        activation: name of the activation.
        per_token: ``x_scale`` has one element a row.
        out_per_channel: the quantizer of the output has one scale a column.
    """

    activation: str = "none"
    per_token: bool = False
    out_per_channel: bool = False


class QLinearTemplate(OperatorTemplate):
    """One call of ``qinductor::qlinear`` or ``qinductor::qlinear_merged``.

    Args:
        implementation: which instruction set's code to write.
        operands: name → realized node; those of :data:`PER_WEIGHT` by :func:`weight_operand`.
        layout: of the output, (M, weights * N) contiguous.
        epilogue: see the class.
        weights: number of weights.
    """

    def __init__(
        self,
        implementation: Implementation,
        operands: dict[str, Any],
        layout: ir.Layout,
        epilogue: Epilogue,
        weights: int = 1,
    ) -> None:
        super().__init__(implementation, operands, {"out": layout})
        self.epilogue = epilogue
        self.weights = weights

    @property
    def operand_names(self) -> tuple[str, ...]:
        """See the base class."""
        weights = (weight_operand(n, i) for n in PER_WEIGHT for i in range(self.weights))
        return (*SHARED, *weights, *LAST)

    def problem(self, kernel: CppTemplateKernel) -> str:
        """See the base class."""
        return gemm_facts(self, self.epilogue, self.weights, DTYPE_TO_CPP[self.layout.dtype])

    def call(self, kernel: CppTemplateKernel, problem: str, pointers: dict[str, str]) -> str:
        """See the base class."""
        arguments = gemm_arguments(pointers, self.weights, pointers["out"])
        isa = f"qinductor::{self.implementation.cpp_class}"
        return f"qinductor::gemm<{isa}, {problem}>({arguments}, {rows(kernel, self)}, {ROW_LIMIT});"

    def profile_name(self) -> str:
        """See the base class."""
        n, k = sizes(self)
        return f"{self.implementation.kernel_name}_{n * self.weights}_{k}"


def sizes(template: OperatorTemplate) -> tuple[int, int]:
    """(N, K) of one weight: compile-time facts by now, though spelt as symbols perhaps."""
    columns = template.operands[weight_operand("w_scale", 0)].get_size()[0]
    inner = template.operands["x"].get_size()[1]
    n, k = (V.graph.sizevars.guard_int(size) for size in (columns, inner))
    return n, k


def rows(kernel: CppTemplateKernel, template: OperatorTemplate) -> str:
    """C++ expression of M."""
    return kernel.size(template.operands["x"], 0)


def gemm_facts(template: OperatorTemplate, epilogue: Epilogue, weights: int, out: str) -> str:
    """Members of a problem that ``int8_gemm.h`` asks for; ``out`` is the C++ type it writes."""
    operands = template.operands
    bias = operands.get(weight_operand("bias", 0))
    n, k = sizes(template)

    def ctype(node: Any) -> str:
        return "float" if node is None else str(DTYPE_TO_CPP[node.get_dtype()])

    return f"""\
  using Bias = {ctype(bias)};
  using Residual = {ctype(operands.get("residual"))};
  using Out = {out};
  static constexpr int64_t weights = {weights}, width = {n}, N = {n * weights}, K = {k};
  static constexpr bool per_token = {cpp_bool(epilogue.per_token)};
  static constexpr bool has_bias = {cpp_bool(bias is not None)};
  static constexpr bool has_residual = {cpp_bool("residual" in operands)};
  static constexpr bool requantizes = {cpp_bool(is_uint8(template.layout) and out != "float")};
  static constexpr bool out_per_channel = {cpp_bool(epilogue.out_per_channel)};
  static constexpr auto activation = qinductor::Activation::{epilogue.activation};"""


def gemm_arguments(pointers: dict[str, str], weights: int, out: str) -> str:
    """Initializer of the C++ struct ``Args``."""
    lists = (
        "{" + ", ".join(pointers[weight_operand(name, i)] for i in range(weights)) + "}"
        for name in PER_WEIGHT
    )
    return (
        "{" + ", ".join([*(pointers[n] for n in SHARED), *lists, *(pointers[n] for n in LAST), out])
    ) + "}"
