"""Differences between torch versions; no other module knows them."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

TESTED = "2.13"
"""The torch series that the test suite runs with."""
KNOWN = ("2.11", "2.12", "2.13", "2.14")
"""Series whose Inductor interfaces were read and agree with what this package uses."""


@functools.cache
def check_torch_version() -> None:
    """Warn once where torch is of a series that nobody looked at."""
    series = ".".join(torch.__version__.split(".")[:2])
    if series not in KNOWN:
        warnings.warn(
            f"torch {torch.__version__} is outside the range this package knows ({KNOWN[0]} to "
            f"{KNOWN[-1]}, tested with {TESTED}): its compiler interfaces may have changed. If "
            f"compiling fails, install torch=={TESTED}.*.",
            stacklevel=3,
        )


def rounded_quotient(x: Any, y: Any) -> Any:
    """fl(x / y) of two float32 values in an Inductor kernel, on CUDA; inside of a pointwise body.

    ``ops.div_rn`` came with 2.12; Triton's plain division is off by up to two units.
    """
    from torch._inductor.ops_handler import OpsHandler
    from torch._inductor.virtualized import ops

    if hasattr(OpsHandler, "div_rn"):
        return ops.div_rn(x, y)
    return ops.inline_asm_elementwise(
        x, y, asm="div.rn.f32 $0, $1, $2;", constraints="=f,f,f", dtype=torch.float32
    )


def checkpoint_frame() -> Any:
    """The non-reentrant checkpoint that is running forward now, or None.

    It is the ``frame`` that the hook on saved tensors closes over; its ``recompute_fn`` is what
    runs in the backward pass.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack: Any = hooks[0] if hooks else None
    code = getattr(pack, "__code__", None)
    if code is None or "frame" not in code.co_freevars:
        return None
    frame = pack.__closure__[code.co_freevars.index("frame")].cell_contents
    return frame if hasattr(frame, "recompute_fn") else None
