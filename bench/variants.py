"""What is compared: one model, run in seven ways, and in five more by peers (see bench/peers).

Each is built in a process of its own.

torchao's quantize_ and its x86 quantizer module write to torch._inductor's global configuration and
register passes for the whole process; apart from each other, no variant can feel another.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..zoo import Batch, Loaded
from . import peers

SMALLEST_TORCHAO_DIMENSION = 32
"""torchao's int8 Linear cannot be lowered when a dimension is smaller (its qa_outputs raise)."""

ALPHA = 0.5


class Variant(enum.Enum):
    """A way to run a model."""

    EAGER = "eager"
    INDUCTOR_FP32 = "inductor-fp32"
    INDUCTOR_BF16 = "inductor-bf16"
    TORCHAO_STATIC = "torchao-static"
    TORCHAO_DYNAMIC = "torchao-dynamic"
    QSIM_STATIC = "qsim-static"
    QSIM_DYNAMIC = "qsim-dynamic"
    OPENVINO_INT8 = "openvino-int8"
    ONNXRUNTIME_DYNAMIC = "onnxruntime-dynamic"
    ONNXRUNTIME_STATIC = "onnxruntime-static"
    TORCHAO_STATIC_MAX_AUTOTUNE = "torchao-static-max-autotune"
    CTRANSLATE2_INT8 = "ctranslate2-int8"

    @property
    def is_peer(self) -> bool:
        """Whether it runs only when it is asked for: another runtime, or one slow to compile."""
        return peers.find(self.value) is not None

    @property
    def is_int8(self) -> bool:
        """Whether its Linears multiply int8."""
        return self not in (Variant.EAGER, Variant.INDUCTOR_FP32, Variant.INDUCTOR_BF16)

    @property
    def is_fp32(self) -> bool:
        """Whether it computes what the float model computes, in fp32."""
        return self in (Variant.EAGER, Variant.INDUCTOR_FP32)

    @property
    def activation(self) -> str:
        """How a variant of torch gets its activation scales: "static" or "dynamic"."""
        return "static" if "-static" in self.value else "dynamic"


STANDARD = tuple(variant for variant in Variant if not variant.is_peer)
"""The variants of every run, in the order of the table."""

_TORCHAO = (Variant.TORCHAO_STATIC, Variant.TORCHAO_DYNAMIC, Variant.TORCHAO_STATIC_MAX_AUTOTUNE)


def quantize_with_torchao(model: nn.Module, calibration: Batch, activation: str) -> nn.Module:
    """Quantize a copy of ``model`` with torchao's own SmoothQuant.

    Its observer concatenates what it saw, so the calibration is a single batch.

    Args:
        model: float, eval mode.
        calibration: one batch.
        activation: "static" (one scale a tensor) or "dynamic" (one a row).
    """
    # The import registers the fusion passes; without it the quantized model runs unfused.
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer  # noqa: F401
    from torchao.prototype.smoothquant import SmoothQuantConfig
    from torchao.quantization import PerRow, PerTensor, quantize_
    from torchao.quantization.quant_api import (
        Int8DynamicActivationInt8WeightConfig,
        Int8StaticActivationInt8WeightConfig,
    )
    from torchao.quantization.quantize_.common.quantization_step import QuantizationStep

    def is_large_linear(module: nn.Module, _name: str) -> bool:
        return (
            isinstance(module, nn.Linear) and min(module.weight.shape) >= SMALLEST_TORCHAO_DIMENSION
        )

    def base() -> Any:
        if activation == "static":
            return Int8StaticActivationInt8WeightConfig(granularity=[PerTensor(), PerRow()])
        return Int8DynamicActivationInt8WeightConfig(granularity=[PerRow(), PerRow()])

    def config(step: QuantizationStep) -> Any:
        return SmoothQuantConfig(base_config=base(), step=step, alpha=ALPHA)

    quantized = copy.deepcopy(model)
    quantize_(quantized, config(QuantizationStep.PREPARE), is_large_linear)
    with torch.no_grad():
        quantized(**calibration)
    observed = type(quantized).__name__  # only for the message below
    quantize_(
        quantized,
        config(QuantizationStep.CONVERT),
        lambda module, _name: type(module).__name__ == "SmoothQuantObservedLinear",
    )
    if not any("Int8Tensor" in type(p).__name__ for p in quantized.parameters()):
        raise RuntimeError(f"torchao quantized no Linear of {observed}")
    return quantized


def quantize(model: nn.Module, variant: Variant, calibration: Sequence[Batch]) -> nn.Module:
    """Return what ``variant`` compiles: the model itself, in bf16, or quantized."""
    if variant is Variant.INDUCTOR_BF16:
        return model.to(torch.bfloat16)
    if variant in _TORCHAO:
        return quantize_with_torchao(model, calibration[0], variant.activation)
    if variant in (Variant.QSIM_STATIC, Variant.QSIM_DYNAMIC):
        import qinductor

        config = qinductor.SmoothQuantConfig(alpha=ALPHA, activation=variant.activation)
        return qinductor.quantize_model(model, calibration, config)
    return model


def compiled(
    model: nn.Module, variant: Variant, *, isa: str | None, max_autotune: bool
) -> Callable[..., Any]:
    """Compile for fixed shapes, the best case of every variant.

    Freezing lets stock Inductor pack weights ahead of time; its int8 fusions need it.

    Args:
        model: from :func:`quantize`.
        variant: the way.
        isa: cap of the instruction set for qsim, None for the best.
        max_autotune: let torchao's variants time candidates; slow to compile, sometimes quicker.
    """
    if variant is Variant.EAGER:
        return model
    if variant in (Variant.QSIM_STATIC, Variant.QSIM_DYNAMIC):
        options = {} if isa is None else {"isa": isa}
        return torch.compile(model, backend="qsim", dynamic=False, options=options)  # type: ignore[arg-type]
    stock: dict[str, Any] = {"freezing": True}
    if variant is Variant.TORCHAO_STATIC_MAX_AUTOTUNE or (max_autotune and variant in _TORCHAO):
        stock["max_autotune"] = True
    return torch.compile(model, dynamic=False, options=stock)


class _Torch:
    """A variant that torch compiles, or runs as it is."""

    def __init__(
        self, model: nn.Module, variant: Variant, *, isa: str | None, max_autotune: bool
    ) -> None:
        self.model, self.variant = model, variant
        self.isa, self.max_autotune = isa, max_autotune

    def ready(self, inputs: Batch) -> Callable[[], Any]:
        """See :class:`qinductor.bench.peers.Engine`."""
        torch._dynamo.reset()
        run = compiled(self.model, self.variant, isa=self.isa, max_autotune=self.max_autotune)

        def call() -> Any:
            with torch.no_grad():
                return run(**inputs).last_hidden_state

        return call


def engine(
    variant: Variant,
    loaded: Loaded,
    calibration: Batch,
    *,
    threads: int,
    isa: str | None,
    max_autotune: bool,
) -> peers.Engine:
    """Quantize the model of ``loaded`` (which may change it) the way ``variant`` does."""
    peer = peers.find(variant.value)
    if peer is not None and peer.module is not None:
        return peer.build(loaded, calibration, threads)
    model = quantize(loaded.model, variant, [calibration])
    return _Torch(model, variant, isa=isa, max_autotune=max_autotune)
