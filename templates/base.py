"""What a template says about itself, and the choice among several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ..capability import Capability, Isa

KERNEL_META = "qinductor_kernel"
"""Key of ``node.meta`` under which the chosen :class:`Implementation` travels to the lowering."""


@dataclass(frozen=True)
class Implementation:
    """One way to run an operator.

    Attributes:
        op: the operator's name without its namespace.
        isa: the instruction set the code needs.
        sources: names of the C++ files, in the order in which a kernel includes them.
        cpp_class: the struct in the last of them that a kernel instantiates.
        needs_bf16: the code uses the bf16 dot products of AVX-512.
        operands: the operands' types, as kernel names begin.
    """

    op: str
    isa: Isa
    sources: tuple[str, ...]
    cpp_class: str
    needs_bf16: bool = False
    operands: str = "u8_s8"

    @property
    def kernel_name(self) -> str:
        """<activation>_<weight>_<op>__<isa>, as the report names it."""
        return f"{self.operands}_{self.op}__{self.isa.value}"

    def usable(self, capability: Capability) -> bool:
        """True where the machine has what the code needs."""
        return self.isa in capability.isas and (capability.avx512_bf16 or not self.needs_bf16)


@dataclass(frozen=True)
class GpuImplementation:
    """One way to run an operator on a CUDA device, as a Triton template.

    Attributes:
        op: the operator's name without its namespace.
        operands: what the tensor cores multiply, as :meth:`Gpu.reason_against` names it.
    """

    op: str
    operands: str

    @property
    def kernel_name(self) -> str:
        """<activation>_<weight>_<op>__triton, as the report names it."""
        return f"{self.operands}_{self.operands}_{self.op}__triton"

    def usable(self, capability: Capability) -> bool:
        """True where the GPU's tensor cores multiply the operands."""
        return self.reason_against(capability) is None

    def reason_against(self, capability: Capability) -> str | None:
        """Why it cannot run, as the report says it; None where it can."""
        if capability.gpu is None:
            return "torch finds no CUDA device"
        return capability.gpu.reason_against(self.operands)


class _Usable(Protocol):
    def usable(self, capability: Capability) -> bool: ...


_Choice = TypeVar("_Choice", bound=_Usable)


def choose(implementations: Sequence[_Choice], capability: Capability) -> _Choice | None:
    """Return the first usable implementation, or None."""
    return next((i for i in implementations if i.usable(capability)), None)
