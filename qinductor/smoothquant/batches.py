"""Reading a calibration batch: which keys a model takes, and which positions are padding."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CalibrationError

MASK = "attention_mask"


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


def valid_keys(model: nn.Module) -> tuple[str, ...] | None:
    """Names that ``model.forward`` takes as keywords; None where it takes any.

    A catch-all that is annotated with a TypedDict, as HuggingFace's models have it, takes the
    names of that TypedDict; a bare ``**kwargs`` takes anything.
    """
    names: list[str] = []
    for name, parameter in _parameters(model).items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            annotation = parameter.annotation
            # Annotations of a module with `from __future__ import annotations` are text.
            if isinstance(annotation, str):
                annotation = _resolve(model, name)
            unpacked = typing.get_args(annotation)
            if len(unpacked) != 1 or not typing.is_typeddict(unpacked[0]):
                return None
            names += sorted(unpacked[0].__required_keys__ | unpacked[0].__optional_keys__)
        elif parameter.kind in (
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.KEYWORD_ONLY,
        ):
            names.append(name)
    return tuple(names)


def _resolve(model: nn.Module, name: str) -> object:
    forward: Callable[..., Any] = inspect.unwrap(model.forward)
    try:
        return typing.get_type_hints(forward).get(name)
    except (NameError, TypeError):
        return None


def check_keys(model: nn.Module, kwargs: Mapping[str, object]) -> None:
    """Raise if a keyword of a batch is none that the model takes.

    Raises:
        CalibrationError: naming the first such key and the valid ones.
    """
    valid = valid_keys(model)
    if valid is None:
        return
    for key in kwargs:
        if key not in valid:
            raise CalibrationError(
                f"a calibration batch has the key {key!r}, which {type(model).__name__} does not "
                f"take. Valid: {', '.join(valid)}. Remove it from the batch."
            )


def _named(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """All inputs of a call by parameter name; a dict given as one argument is opened."""
    positional = [
        name
        for name, parameter in _parameters(model).items()
        if parameter.kind
        in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    named = {**dict(zip(positional, args, strict=False)), **kwargs}
    for value in [*named.values()]:
        if isinstance(value, Mapping):
            named.update({key: v for key, v in value.items() if key not in named})
    return named


def token_shape(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Size | None:
    """Shape of the token grid, (batch, sequence), where the call's inputs tell; else None."""
    named = _named(model, args, kwargs)
    ids, embeds, mask = (named.get(name) for name in ("input_ids", "inputs_embeds", MASK))
    if isinstance(ids, Tensor):
        return ids.shape
    if isinstance(embeds, Tensor):
        return embeds.shape[:-1]
    return mask.shape if isinstance(mask, Tensor) and mask.ndim == 2 else None


def real_tokens(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Return the batch's attention mask as bool, True for a real token; None if it has none.

    Raises:
        CalibrationError: the mask does not say which tokens are real, because it has another shape
            than the token grid, or it calls none of them real.
    """
    mask = _named(model, args, kwargs).get(MASK)
    if not isinstance(mask, Tensor):
        return None
    grid = token_shape(model, args, kwargs)
    if mask.shape != grid:
        raise CalibrationError(
            f"{MASK} has shape {tuple(mask.shape)}; calibration needs one entry a token"
            f"{'' if grid is None else f', {tuple(grid)}'} (1 real, 0 padding), so that padding "
            "moves no statistic. Calibrate with the tokenizer's own mask."
        )
    real = mask.detach() != 0
    if not bool(real.any()):
        raise CalibrationError(f"{MASK} of a calibration batch calls every token padding.")
    return real
