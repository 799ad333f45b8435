"""load: a directory that save() wrote becomes an int8 model again.

The model is built without numbers (on the meta device) and filled from the file, so that float
weights of the int8 layers never exist. Large float tensors stay mapped, as from_pretrained() leaves
them: rows of an embedding that no text uses take no memory.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SavedModelError
from . import attention
from .layout import (
    FORMAT_VERSION,
    HF_CONFIG,
    MANIFEST,
    WEIGHTS,
    build_layer,
    digest,
    float_tensors,
    join,
)
from .memory import release_free_memory
from .sites import RECIPE_ATTRIBUTE, SITES_ATTRIBUTE

MAPPED_BYTES = 1 << 20
"""A float tensor of this size or more stays mapped from the file; a smaller one is copied."""


def load(directory: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Return the int8 model that :func:`qinductor.save` wrote, in eval mode.

    Args:
        directory: what save() was given.
        model: the float model to fill, for a model that is not one of HuggingFace's classes. It
            may stand on the meta device; it is changed in place and must not be used afterwards.

    Raises:
        SavedModelError: the directory is missing, incomplete, damaged or of a newer version; or
            it does not fit ``model``, or needs one. The message names the file and the way out.
    """
    folder = Path(directory)
    manifest = _manifest(folder)
    _check_weights(folder, manifest)
    skeleton = _skeleton(folder, manifest) if model is None else model
    try:
        tensors = _tensors(folder, manifest)
        result = _fill(skeleton, manifest, tensors, folder)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, SavedModelError):
            raise
        raise SavedModelError(
            f"{folder / MANIFEST} and {WEIGHTS} do not belong together ({error!r}). "
            "Save the model again."
        ) from error
    setattr(result, SITES_ATTRIBUTE, manifest["sites"])
    setattr(result, RECIPE_ATTRIBUTE, manifest["recipe"])
    for parameter in result.parameters():
        parameter.requires_grad_(False)
    release_free_memory()
    return result.eval()


# ---------------------------------------------------------------- reading


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not folder.is_dir():
        raise SavedModelError(f"{folder} is not a directory. Give the one qinductor.save() wrote.")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["format_version"]
    except FileNotFoundError:
        raise SavedModelError(
            f"{path} is missing: {folder} is not a saved int8 model. A float model is read with "
            "from_pretrained() and quantized with qinductor.quantize_model()."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SavedModelError(f"{path} is damaged ({error!r}). Save the model again.") from error
    if not isinstance(version, int) or version > FORMAT_VERSION:
        by = manifest.get("versions", {}).get("qinductor", "a newer version")
        raise SavedModelError(
            f"{path} has format version {version!r}, written by qinductor {by}; this one reads up "
            f"to {FORMAT_VERSION}. Upgrade qinductor, or save the model again with this version."
        )
    keys = ("model", "recipe", "weights_sha256", "layers", "aliases", "sites")
    missing = [key for key in keys if key not in manifest]
    if missing:
        raise SavedModelError(f"{path} lacks {', '.join(missing)}. Save the model again.")
    return dict(manifest)


def _check_weights(folder: Path, manifest: dict[str, Any]) -> None:
    path = folder / WEIGHTS
    if not path.is_file():
        raise SavedModelError(f"{path} is missing. Copy it again, or save the model again.")
    if digest(path) != manifest["weights_sha256"]:
        raise SavedModelError(
            f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}. Copy it again, or save "
            "the model again."
        )


def _tensors(folder: Path, manifest: dict[str, Any]) -> dict[str, Tensor]:
    """Read everything but the int8 codes, which are read when their layer is built."""
    codes = {join(name, "weight") for name in manifest["layers"]}
    tensors: dict[str, Tensor] = {}
    with _open(folder) as file:
        for name in file.keys():  # noqa: SIM118 - no mapping, it only has this method
            if name not in codes:
                tensor = file.get_tensor(name)
                tensors[name] = tensor if tensor.nbytes >= MAPPED_BYTES else tensor.clone()
    for name, first in manifest["aliases"].items():
        tensors[name] = tensors[first]
    return tensors


def _open(folder: Path) -> Any:
    from safetensors import safe_open

    return safe_open(folder / WEIGHTS, framework="pt")


def _skeleton(folder: Path, manifest: dict[str, Any]) -> nn.Module:
    """Build the float model's modules on the meta device."""
    identity = manifest["model"]
    if identity.get("library") != "transformers":
        raise SavedModelError(
            f"{folder} holds a {identity.get('class')}, which only your own code can build: "
            "qinductor.load(directory, model=YourModel(...))."
        )
    try:
        import transformers
    except ImportError:
        raise SavedModelError(
            f"{folder} holds a {identity['class']} of transformers, which is not installed: "
            "pip install 'qinductor[hf]'."
        ) from None
    kind = getattr(transformers, identity["class"], None)
    if kind is None:
        raise SavedModelError(
            f"transformers {transformers.__version__} has no {identity['class']}; the model was "
            f"saved with {manifest.get('versions', {}).get('transformers')}. Install that version."
        )
    path = folder / HF_CONFIG
    if not path.is_file():  # transformers would quietly take its defaults
        raise SavedModelError(f"{path} is missing. Copy it again, or save the model again.")
    try:
        config = kind.config_class.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise SavedModelError(f"{path} is damaged ({error}). Save the model again.") from error
    if identity.get("attn_implementation") == attention.NAME:
        attention.register()
    config._attn_implementation = identity.get("attn_implementation")
    with torch.device("meta"):
        skeleton: nn.Module = kind(config, **identity.get("arguments", {}))
    return skeleton


# ---------------------------------------------------------------- filling


def _fill(
    model: nn.Module, manifest: dict[str, Any], tensors: dict[str, Tensor], folder: Path
) -> nn.Module:
    """Put int8 layers and float tensors into a float model; refuse before changing anything."""
    layers: dict[str, dict[str, Any]] = manifest["layers"]
    replaced = {name: _layer_place(model, name, facts) for name, facts in layers.items()}
    of_layers = {join(name, t) for name, facts in layers.items() for t in facts["tensors"]}
    places = {
        name: tensor
        for name, tensor in float_tensors(model).items()
        if name.rpartition(".")[0] not in replaced
    }
    _compare(places, {n: t for n, t in tensors.items() if n not in of_layers})
    # A mapping of its own: the pages that hold codes are given back with it.
    new: dict[int, nn.Module] = {}
    with _open(folder) as file:
        for name, linear in replaced.items():
            held = {t: tensors[join(name, t)] for t in layers[name]["tensors"] if t != "weight"}
            held["weight"] = file.get_tensor(join(name, "weight"))
            new[id(linear)] = build_layer(layers[name], held)
    parameters: dict[int, nn.Parameter] = {}
    for name, place in places.items():
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        tensor = tensors[name]
        if isinstance(place, nn.Parameter):
            if id(tensor) not in parameters:
                parameters[id(tensor)] = nn.Parameter(tensor, requires_grad=False)
            module._parameters[own] = parameters[id(tensor)]
        else:
            module._buffers[own] = tensor
    _refuse_unfilled(model)
    for module in list(model.modules()):
        for child_name, child in module._modules.items():
            if id(child) in new:
                module._modules[child_name] = new[id(child)]
    return new.get(id(model), model)


def _layer_place(model: nn.Module, name: str, facts: dict[str, Any]) -> nn.Linear:
    try:
        place = model.get_submodule(name)
    except AttributeError:
        place = None
    n, k = facts["out_features"], facts["in_features"]
    if not isinstance(place, nn.Linear) or (place.out_features, place.in_features) != (n, k):
        raise SavedModelError(
            f"the model to fill has {place!r} where the saved one has the Linear {name!r} with "
            f"{k} inputs and {n} outputs. Build it as the saved one was built."
        )
    return place


def _compare(places: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    for name in [n for n in places if n not in tensors] + [n for n in tensors if n not in places]:
        side = "the saved model lacks" if name in places else "the model to fill lacks"
        raise SavedModelError(f"{side} the tensor {name!r}. Build it as the saved one was built.")
    for name, place in places.items():
        if place.shape != tensors[name].shape:
            raise SavedModelError(
                f"{name!r} has shape {tuple(place.shape)} in the model to fill and "
                f"{tuple(tensors[name].shape)} in the saved one. Build it as that was built."
            )


def _refuse_unfilled(model: nn.Module) -> None:
    """Refuse a model that keeps a tensor without numbers in a plain attribute."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise SavedModelError(
                    f"{join(name, attribute)} is a tensor that is neither parameter nor buffer, "
                    "so that it was not saved. Use qinductor.load(directory, model=...) with a "
                    "model that you built yourself."
                )
