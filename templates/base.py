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
    """

    op: str
    isa: Isa
    sources: tuple[str, ...]
    cpp_class: str

    @property
    def kernel_name(self) -> str:
        """<activation>_<weight>_<op>__<isa>, as the report names it."""
        return f"u8_s8_{self.op}__{self.isa.value}"


def choose(implementations: Sequence[Implementation], capability: Capability) -> Implementation:
    """Return the first implementation whose instruction set is usable.

    The portable one needs nothing, so there always is one.
    """
    return next(i for i in implementations if i.isa in capability.isas)
