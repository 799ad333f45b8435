"""What is compared: one model, run in seven ways. Each is built in a process of its own.

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

from ..zoo import Batch

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

    @property
    def is_int8(self) -> bool:
        """Whether its Linears multiply int8."""
        return self.value.startswith(("torchao", "qsim"))

    @property
    def is_fp32(self) -> bool:
        """Whether it computes what the float model computes, in fp32."""
        return self in (Variant.EAGER, Variant.INDUCTOR_FP32)

    @property
    def activation(self) -> str:
        """How an int8 variant gets its activation scales: "static" or "dynamic"."""
        return self.value.rsplit("-", 1)[-1]


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
    if variant in (Variant.TORCHAO_STATIC, Variant.TORCHAO_DYNAMIC):
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
    if max_autotune and variant.is_int8:
        stock["max_autotune"] = True
    return torch.compile(model, dynamic=False, options=stock)
