"""save: an int8 model becomes a directory, completely or not at all."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import SavedModelError
from .layout import (
    FORMAT_VERSION,
    HF_CONFIG,
    MANIFEST,
    WEIGHTS,
    digest,
    float_tensors,
    layer_facts,
    layer_tensors,
    require_free,
)
from .linear import QuantizedLinear
from .sites import RECIPE_ATTRIBUTE, SITES_ATTRIBUTE

_PACKAGES = ("qinductor", "torch", "torchao", "transformers", "safetensors")


def save(qmodel: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Write an int8 model to a new directory: beside it first, then renamed.

    Args:
        qmodel: what convert(), quantize_model() or from_torchao() returned.
        directory: must not exist, or be empty.

    Raises:
        SavedModelError: the directory is in the way, cannot be written, or the model is not int8.
    """
    target = Path(directory)
    layers = {
        name: module
        for name, module in qmodel.named_modules()
        if isinstance(module, QuantizedLinear)
    }
    if not layers:
        raise SavedModelError(
            f"this {type(qmodel).__name__} has no int8 layer. Save what qinductor.convert() or "
            "qinductor.quantize_model() returned."
        )
    require_free(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            _write(qmodel, layers, beside)
            beside.chmod(0o777 & ~_umask())
            if target.exists():
                target.rmdir()
            beside.rename(target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as error:
        raise SavedModelError(
            f"{target} could not be written ({error}). Nothing of it is left behind."
        ) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write(qmodel: nn.Module, layers: dict[str, QuantizedLinear], folder: Path) -> None:
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, layer in layers.items():
        tensors |= layer_tensors(name, layer)
    tensors |= float_tensors(qmodel)
    unique, aliases = _without_copies(tensors)
    save_file(unique, folder / WEIGHTS, metadata={"format": "pt"})
    manifest: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "versions": _versions(),
        "model": _identity(qmodel),
        "recipe": getattr(qmodel, RECIPE_ATTRIBUTE, {}),
        "weights_sha256": digest(folder / WEIGHTS),
        "layers": {name: layer_facts(layer) for name, layer in layers.items()},
        "aliases": aliases,
        "sites": getattr(qmodel, SITES_ATTRIBUTE, []),
    }
    if manifest["model"]["library"] == "transformers":
        qmodel.config.save_pretrained(folder)  # type: ignore[operator, union-attr]
        assert (folder / HF_CONFIG).is_file()
    text = json.dumps(manifest, indent=1, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _without_copies(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor object once, and where else it stands: tied weights, scales of a group."""
    first: dict[int, str] = {}
    storages: set[int] = set()
    unique: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        plain = tensor.detach().cpu().contiguous()
        # Views of one storage that are not one tensor are stored apart.
        if plain.untyped_storage().data_ptr() in storages:
            plain = plain.clone()
        storages.add(plain.untyped_storage().data_ptr())
        unique[name] = plain
    return unique, aliases


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package == "qinductor":
                from .. import __version__

                found[package] = __version__
    return found


def _identity(model: nn.Module) -> dict[str, Any]:
    """How to make the float model again, where that takes no code of the user's."""
    kind = type(model)
    transformers = sys.modules.get("transformers")
    if transformers is None or getattr(transformers, kind.__name__, None) is not kind:
        return {"library": None, "class": f"{kind.__module__}.{kind.__qualname__}"}
    arguments = {}
    if "add_pooling_layer" in inspect.signature(kind).parameters:
        arguments["add_pooling_layer"] = getattr(model, "pooler", None) is not None
    return {
        "library": "transformers",
        "class": kind.__name__,
        "attn_implementation": getattr(model.config, "_attn_implementation", None),
        "arguments": arguments,
    }
