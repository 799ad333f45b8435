"""Graph passes over Inductor's post-grad graph, in the one order in which they run."""

from __future__ import annotations

if __name__ == "passes":
    raise ImportError("import qinductor.passes, not passes: a second registry would load")

from .attention import FuseAttention
from .base import Pass, PassLog
from .check_nan import CheckNan
from .inference_scale import DropInferenceScale
from .kernels import ChooseKernels
from .merge_projections import MergeProjections
from .pt2e_chain import Pt2eChain
from .qlinear_epilogue import FuseActivation, FuseRequantize, FuseResidual
from .row_epilogue import FuseRows
from .shared_quantize import ShareQuantize
from .sink_select import SinkSelect
from .torchao_chain import TorchaoChain

PASSES: tuple[Pass, ...] = (
    DropInferenceScale(),  # what only autograd needed
    TorchaoChain(),  # int8 linears of a model that torchao converted
    Pt2eChain(),  # int8 linears of a model that PT2E quantized
    ShareQuantize(),  # one quantizer for all readers of a tensor
    CheckNan(),  # on request: NaN in what is quantized
    FuseActivation(),  # GELU, ReLU … into the int8 linear
    FuseResidual(),  # + residual into the int8 linear
    FuseAttention(),  # the projections' heads, SDPA and the way back in one kernel
    SinkSelect(),  # only the rows that a classifier reads
    MergeProjections(),  # one GEMM for queries, keys and values
    FuseRows(),  # layer normalization and quantizer while a row is in the cache
    FuseRequantize(),  # the next layer's quantizer into what computes its input
    ChooseKernels(),  # which template runs each int8 linear; names what stays float
)

ON_REQUEST = ("check_nan",)
"""Passes that run only where the option of their name is set."""

__all__ = ["ON_REQUEST", "PASSES", "Pass", "PassLog"]
