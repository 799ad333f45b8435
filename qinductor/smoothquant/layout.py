"""What a saved model's directory looks like: names, version, and the portable form of a layer.

A directory holds ``qinductor.json`` (recipe, versions, layers, decisions), ``model.safetensors``
(int8 weights as plain (N, K), scales, and everything that stayed float) and, for a HuggingFace
model, its ``config.json``. Nothing depends on an instruction set: weights are packed on loading.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SavedModelError
from .linear import QuantizedLinear

FORMAT_VERSION = 1
"""Version of the layout; a directory with a larger one is refused."""
MANIFEST = "qinductor.json"
WEIGHTS = "model.safetensors"
HF_CONFIG = "config.json"

_PORTABLE = {
    "w_scale": "weight_scale",
    "bias": "bias",
    "x_scale": "input_scale",
    "x_inverse_scale": "input_inverse_scale",
    "x_zero_point": "input_zero_point",
    "multiplier": "input_multiplier",
}
"""Buffers of a QuantizedLinear and their names in the file. Sums and packing are made anew."""


def join(prefix: str, name: str) -> str:
    """Qualified name of ``name`` in the module called ``prefix``."""
    return f"{prefix}.{name}" if prefix else name


def layer_tensors(name: str, layer: QuantizedLinear) -> dict[str, Tensor]:
    """Portable tensors of an int8 layer, by their names in the file."""
    tensors = {join(name, "weight"): layer.codes()}
    for buffer, portable in _PORTABLE.items():
        tensor = getattr(layer, buffer)
        if tensor is not None:
            tensors[join(name, portable)] = tensor
    return tensors


def layer_facts(layer: QuantizedLinear) -> dict[str, Any]:
    """What the manifest says about an int8 layer, beside its tensors."""
    return {
        "in_features": layer.in_features,
        "out_features": layer.out_features,
        "dtype": str(layer.dtype).removeprefix("torch."),
        "divisor": layer.divisor,
        "min_scale": layer.min_scale,
        "tensors": [
            "weight",
            *(p for b, p in _PORTABLE.items() if getattr(layer, b) is not None),
        ],
    }


def build_layer(facts: dict[str, Any], tensors: dict[str, Tensor]) -> QuantizedLinear:
    """Undo :func:`layer_facts` and :func:`layer_tensors`; ``tensors`` by name without prefix.

    Raises:
        ValueError: a tensor's shape or dtype is not what the facts say.
    """
    codes = tensors["weight"]
    shape = (facts["out_features"], facts["in_features"])
    if codes.dtype is not torch.int8 or tuple(codes.shape) != shape:
        raise ValueError(f"weight is {codes.dtype} {tuple(codes.shape)}, not int8 {shape}")
    buffers = {b: tensors[p] for b, p in _PORTABLE.items() if p in tensors}
    return QuantizedLinear(
        codes,
        buffers.pop("w_scale"),
        buffers.pop("bias", None),
        divisor=facts["divisor"],
        min_scale=facts["min_scale"],
        dtype=getattr(torch, facts["dtype"]),
        **buffers,
    )


def float_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, transient ones too, of every module that is not an int8 layer.

    A tensor that stands in several places is listed once for each.
    """
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if not isinstance(module, QuantizedLinear):
            for own, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    found[join(name, own)] = tensor
    return found


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    state = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def require_free(directory: Path) -> None:
    """Raise if ``directory`` exists and is not an empty folder.

    Raises:
        SavedModelError: naming it.
    """
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise SavedModelError(f"{directory} exists and is no folder. Choose another name.")
    if directory.is_dir() and any(directory.iterdir()):
        raise SavedModelError(
            f"the output directory {directory} exists already and is not empty. Remove it, or "
            "choose another name: a saved model is never mixed with what was there."
        )
