"""QPyTorch's conversion of models: quantize the outputs of layers of some kinds."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from qinductor.errors import ConfigError

from .number import Number
from .quant import Quantizer

__all__ = ["lower", "sequential_lower"]


def _every(text: str) -> tuple[type[nn.Module], ...]:
    """Classes of torch.nn by name; ``{}`` stands for 1, 2 and 3."""
    names = [n.format(d) for n in text.split() for d in ((1, 2, 3) if "{}" in n else ("",))]
    return tuple(getattr(nn, name) for name in names)


LAYER_TYPES = {
    "conv": _every("Conv{}d ConvTranspose{}d Unfold Fold"),
    "linear": _every("Linear Bilinear"),
    "pool": _every(
        "MaxPool{}d MaxUnpool{}d AvgPool{}d FractionalMaxPool2d LPPool1d LPPool2d "
        "AdaptiveMaxPool{}d AdaptiveAvgPool{}d"
    ),
    "pad": _every("ReflectionPad1d ReflectionPad2d ReplicationPad1d ReplicationPad2d ZeroPad2d "
                  "ConstantPad{}d"),
    "activation": _every(
        "ELU Hardshrink Hardtanh LeakyReLU LogSigmoid PReLU ReLU ReLU6 RReLU SELU Sigmoid Softplus "
        "Softshrink Softsign Tanh Tanhshrink Threshold Softmin Softmax Softmax2d LogSoftmax "
        # Newer than QPyTorch, which passes them over.
        "CELU GELU GLU Hardsigmoid Hardswish Mish SiLU"
    ),
    "normalization": _every("BatchNorm{}d GroupNorm InstanceNorm{}d LayerNorm LocalResponseNorm"),
    "dropout": _every("Dropout Dropout2d Dropout3d AlphaDropout"),
    "loss": _every(
        "L1Loss MSELoss CrossEntropyLoss NLLLoss PoissonNLLLoss KLDivLoss BCELoss "
        "BCEWithLogitsLoss MarginRankingLoss HingeEmbeddingLoss MultiLabelMarginLoss SmoothL1Loss "
        "SoftMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss TripletMarginLoss"
    ),
}  # fmt: skip
"""Kinds of layers by QPyTorch's names. A subclass counts as its base."""


def _chosen(layer_types: Sequence[str]) -> tuple[type[nn.Module], ...]:
    for name in layer_types:
        if name not in LAYER_TYPES:
            raise ConfigError(f"layer type {name!r} is not known. Valid: {', '.join(LAYER_TYPES)}.")
    return tuple(c for name in layer_types for c in LAYER_TYPES[name])


class _Output:
    """A forward hook that quantizes a module's output; it can be copied and pickled."""

    def __init__(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        quantized: Tensor = self.quantizer(output)
        return quantized


def lower(
    model: nn.Module,
    layer_types: Sequence[str] = (),
    forward_number: Number | None = None,
    backward_number: Number | None = None,
    forward_rounding: str = "stochastic",
    backward_rounding: str = "stochastic",
) -> None:
    """Quantize, in place, the outputs of a model's layers of these types, and their gradients.

    Weights are not quantized (that is OptimLP's weight_quant). The state_dict stays as it is.

    Args:
        model: any module.
        layer_types: keys of :data:`LAYER_TYPES`.
        forward_number: format of the outputs, or None.
        backward_number: format of their gradients, or None.
        forward_rounding: "stochastic" or "nearest".
        backward_rounding: "stochastic" or "nearest".

    Raises:
        ConfigError: (a ValueError) a layer type is not known, or a number is not one.
    """
    classes = _chosen(layer_types)
    quantizer = Quantizer(forward_number, backward_number, forward_rounding, backward_rounding)
    for module in model.modules():
        if isinstance(module, classes):
            module.register_forward_hook(_Output(quantizer))


def sequential_lower(
    model: nn.Module,
    layer_types: Sequence[str] = (),
    forward_number: Number | None = None,
    backward_number: Number | None = None,
    forward_rounding: str = "stochastic",
    backward_rounding: str = "stochastic",
) -> nn.Module:
    """A copy of a model in which each such leaf is Sequential(leaf, Quantizer); as :func:`lower`.

    Keys of the state_dict get QPyTorch's ".0" behind the leaf's name.
    """
    classes = _chosen(layer_types)
    quantizer = Quantizer(forward_number, backward_number, forward_rounding, backward_rounding)

    def replaced(module: nn.Module) -> nn.Module:
        children = list(module.named_children())
        for name, child in children:
            setattr(module, name, replaced(child))
        leaf = not children and isinstance(module, classes)
        return nn.Sequential(module, quantizer) if leaf else module

    return replaced(copy.deepcopy(model))
