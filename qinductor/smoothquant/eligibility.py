"""Which Linears can become int8, and why the others cannot."""

from __future__ import annotations

import fnmatch

import torch
from torch import Tensor, nn

from .. import ops
from ..errors import ConfigError, ModelError
from .config import SmoothQuantConfig

MIN_FEATURES = 32
"""A Linear with fewer inputs or outputs stays in float: a panel of the int8 kernel has 64 columns,
most of which would be padding. torchao's recipe draws the same line."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """All Linears (subclasses too) by their first qualified name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def refusals(model: nn.Module, config: SmoothQuantConfig) -> dict[str, str]:
    """Return the Linears that stay in float whatever calibration shows, with the reasons.

    Raises:
        ModelError: the model has no Linear, or none is left.
        ConfigError: a pattern of ``config.skip`` matches no module.
    """
    found = linears(model)
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no nn.Linear: there is nothing to quantize to int8."
        )
    names = [name for name, _ in model.named_modules()]
    for pattern in config.skip:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(
                f"skip pattern {pattern!r} matches no module. Names look like "
                f"{next(iter(found))!r}."
            )
    owners = _weight_owners(model)
    reasons = {
        name: reason
        for name, linear in found.items()
        if (reason := _refusal(name, linear, config, owners)) is not None
    }
    if len(reasons) == len(found):
        listed = "; ".join(f"{name or 'the model'}: {why}" for name, why in reasons.items())
        raise ModelError(f"no Linear of {type(model).__name__} can become int8. {listed}.")
    return reasons


def _weight_owners(model: nn.Module) -> dict[int, list[str]]:
    owners: dict[int, list[str]] = {}
    for layer, module in model.named_modules():
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append(layer)
    return owners


def _refusal(
    name: str, linear: nn.Linear, config: SmoothQuantConfig, owners: dict[int, list[str]]
) -> str | None:
    for pattern in config.skip:
        if fnmatch.fnmatchcase(name, pattern):
            return f"matches the skip pattern {pattern!r}"
    if type(linear) is not nn.Linear:
        return f"is a {type(linear).__name__}, which may compute something else than nn.Linear"
    if type(linear.weight.data) is not Tensor:
        return f"its weight is a {type(linear.weight.data).__name__}, not a plain tensor"
    if linear.weight.dtype not in _DTYPES:
        return f"its weight is {str(linear.weight.dtype).removeprefix('torch.')}"
    shared = [other for other in owners[id(linear.weight)] if other != name]
    if shared:
        return f"its weight is tied to {', '.join(shared)}"
    n, k = linear.weight.shape
    if min(n, k) < MIN_FEATURES:
        return f"{k} inputs and {n} outputs: below {MIN_FEATURES} int8 cannot pay"
    if k > ops.MAX_K:
        return f"{k} inputs: above {ops.MAX_K} the int32 sum could overflow"
    return None
