"""What runs an operator on a device that is no CPU, as the report says it."""

from __future__ import annotations

from torch import fx

from ..capability import Capability
from ..templates import GPU_TEMPLATES
from ..templates.base import choose
from .base import argument, value


def gpu_kernel(op: str, device: str, capability: Capability) -> tuple[str | None, str]:
    """Name of the template that runs ``op`` on ``device``, and why there is none.

    Returns:
        (name, "") or (None, reason).
    """
    if device != "cuda":
        return None, f"no template for device {device}"
    implementations = GPU_TEMPLATES[op]
    chosen = choose(implementations, capability)
    if chosen is not None:
        return chosen.kernel_name, ""
    return None, "; ".join(str(i.reason_against(capability)) for i in implementations)


def weight_note(linear: fx.Node) -> str:
    """What the report adds where an int8 linear's weight lies in panels, as CPUs want it.

    The template reads rows; a view of the panels does not exist, so every call copies them.
    """
    packed = value(argument(linear, "packed"))
    in_rows = packed.permute(0, 2, 1, 3).is_contiguous()
    return "" if in_rows else "; copies its weight in every call: see qinductor.gpu.lay_out"
