"""Graph passes over Inductor's post-grad graph, in the one order in which they run."""

from __future__ import annotations

if __name__ == "passes":
    raise ImportError("import qinductor.passes, not passes: a second registry would load")

from .base import Pass, PassLog
from .kernels import ChooseKernels
from .qlinear_epilogue import FuseActivation, FuseRequantize, FuseResidual
from .shared_quantize import ShareQuantize

PASSES: tuple[Pass, ...] = (
    ShareQuantize(),  # one quantizer for all readers of a tensor
    FuseActivation(),  # GELU, ReLU … into the int8 linear
    FuseResidual(),  # + residual into the int8 linear
    FuseRequantize(),  # the next layer's quantizer into the int8 linear
    ChooseKernels(),  # which template runs each int8 linear; names what stays float
)

__all__ = ["PASSES", "Pass", "PassLog"]
