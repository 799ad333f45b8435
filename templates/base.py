"""What a template says about itself, and the choice among several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def choose(
    implementations: Sequence[Implementation], capability: Capability
) -> Implementation | None:
    """Return the first usable implementation, or None."""
    return next((i for i in implementations if i.usable(capability)), None)
