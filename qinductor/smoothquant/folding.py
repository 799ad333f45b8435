"""Where each smoothing factor goes, and putting it there.

A group of Linears reads one tensor x. Its factors s divide x and multiply the columns of the
group's weights, which leaves every product as it was. The division is folded, in this order:

1. into weight and bias of the normalization layer that makes x, if only the group reads x;
2. into rows of the Linear that makes x, if only channel-preserving operations lie between;
3. static: into the quantizer, whose scale becomes per channel;
4. dynamic: nowhere; the quantizer multiplies by 1/s, and the site says so.

Groups are treated from the last to the first, because (2) changes the weights of an earlier one,
on which that one's own factors depend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .config import SmoothQuantConfig
from .dataflow import Facts, Source
from .observers import LinearObserver
from .sites import Fold
from .smoothing import powers_of_two, smoothing_factors


@dataclass(frozen=True)
class Decision:
    """What is done about one group.

    Attributes:
        group: names of its Linears.
        fold: where the factors go.
        into: name of the layer that takes them ("norm" and "linear"), else None.
        rows: for "linear", the row of that layer for each channel of x.
        why: why they go no further up, None where they go into a layer.
    """

    group: tuple[str, ...]
    fold: Fold
    into: str | None = None
    rows: tuple[int, ...] = ()
    why: str | None = None


@dataclass(frozen=True)
class GroupRange:
    """Statistics of a group's input: the union over its members. float32 (K,) each."""

    low: Tensor
    high: Tensor

    @property
    def magnitude(self) -> Tensor:
        """Largest magnitude of each channel."""
        return torch.maximum(self.low.abs(), self.high.abs())


def group_range(group: tuple[str, ...], observers: Mapping[str, LinearObserver]) -> GroupRange:
    """Join what the members' observers saw."""
    lows = [low for name in group if (low := observers[name].low) is not None]
    highs = [high for name in group if (high := observers[name].high) is not None]
    return GroupRange(torch.stack(lows).amin(dim=0), torch.stack(highs).amax(dim=0))


def decide(
    members: tuple[str, ...],
    kept: Mapping[str, str],
    facts: Facts,
    config: SmoothQuantConfig,
    model: nn.Module,
) -> Decision:
    """Choose where the factors of a group go.

    Args:
        members: all watched Linears that read the tensor.
        kept: Linears that stay in float after all; the decision is about the others.
        facts: the dataflow.
        config: the recipe.
        model: the float model, as folded so far.
    """
    group = tuple(name for name in members if name not in kept)
    if config.alpha is None:
        return Decision(group, Fold.NONE)
    sources = {source for name in group for source in facts.sources[name]}
    others = ", ".join(name for name in members if name in kept)
    if others:
        why: str | None = f"the tensor is also read by {others}, kept in float"
    else:
        why = _obstacle(group, sources, facts, model)
    if why is None:
        (source,) = sources
        return Decision(group, Fold(source.kind), source.module, source.rows)
    return Decision(group, Fold.QUANTIZER if config.is_static else Fold.MULTIPLY, why=why)


def _obstacle(
    group: tuple[str, ...], sources: set[Source], facts: Facts, model: nn.Module
) -> str | None:
    """Return why no layer can take the factors, None if one can."""
    for source in sources:
        if source.kind == "other":
            return source.why
    if len(sources) > 1:
        makers = ", ".join(sorted(source.module for source in sources))
        return f"different layers make the tensor in different calls: {makers}"
    (source,) = sources
    if not all(fed and fed <= set(group) for fed in facts.feeds[source.module]):
        return f"{source.module} is also used for something else"
    if source.module in facts.foreign:
        return f"the parameters of {source.module} are also read by something else"
    if source.module in group:
        return f"{source.module} feeds itself"
    layer = model.get_submodule(source.module)
    tensors = [layer.weight, getattr(layer, "bias", None)]
    if not all(
        t is None or (isinstance(t, nn.Parameter) and t.is_floating_point()) for t in tensors
    ):
        return f"{source.module} holds its parameters in another form"
    return None


def group_factors(decision: Decision, alpha: float, seen: GroupRange, model: nn.Module) -> Tensor:
    """Smoothing factors of a group, float32 (K,), from its weights as they are now."""
    columns = [weight_of(model, name).detach().float() for name in decision.group]
    w_max = torch.stack([w.abs().amax(dim=0) for w in columns]).amax(dim=0)
    factors = smoothing_factors(seen.magnitude, w_max, alpha)
    if decision.into is not None:
        touched = [weight_of(model, name) for name in (decision.into, *decision.group)]
        if any(weight.dtype is not torch.float32 for weight in touched):
            return powers_of_two(factors)
    return factors


def weight_of(model: nn.Module, name: str) -> Tensor:
    """Weight of the layer called ``name``."""
    weight = model.get_submodule(name).weight
    assert isinstance(weight, Tensor)
    return weight


@torch.no_grad()
def apply_fold(decision: Decision, factors: Tensor, model: nn.Module) -> None:
    """Divide the layer that takes the factors, and multiply the group's columns, in place.

    The float model computes the same function afterwards: exactly where factors are powers of two
    (always so in bfloat16 and float16), else up to the rounding of one multiplication a weight.
    """
    if decision.into is None:
        return
    layer: Any = model.get_submodule(decision.into)
    rows = list(decision.rows) if decision.fold is Fold.LINEAR else slice(None)
    for parameter in (layer.weight, getattr(layer, "bias", None)):
        if parameter is not None:
            by_row = factors if parameter.ndim == 1 else factors[:, None]
            parameter[rows] = (parameter[rows].float() / by_row).to(parameter.dtype)
    for name in decision.group:
        weight = weight_of(model, name)
        weight.copy_((weight.float() * factors).to(weight.dtype))
