"""What was decided about each Linear of a model: data that report and CLI print."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any

from torch import nn

SITES_ATTRIBUTE = "_qinductor_sites"
"""Attribute of a converted model: a list of :meth:`Site.to_dict`."""
RECIPE_ATTRIBUTE = "_qinductor_recipe"
"""Attribute of a converted model: the recipe's fields, with the key "source"."""


class Fold(enum.Enum):
    """Where the division of an activation by its smoothing factors went."""

    NONE = "none"
    """There is no smoothing."""
    NORM = "norm"
    """Into weight and bias of the normalization layer that makes the tensor."""
    LINEAR = "linear"
    """Into the rows of the Linear that makes the tensor."""
    QUANTIZER = "quantizer"
    """Into the static quantizer: its scale is per channel, nothing is multiplied."""
    MULTIPLY = "multiply"
    """Nowhere: the per-token quantizer multiplies by the reciprocals at run time."""


@dataclass(frozen=True)
class Site:
    """One Linear of the model and what became of it.

    Attributes:
        name: qualified module name.
        int8: whether it runs in int8; else ``reason`` says why not.
        reason: why it was kept in float, None for an int8 site.
        in_features, out_features: K and N.
        activation: "static u8", "static s8", "dynamic s8 per token", or None if kept.
        group: names of all Linears that read the same tensor and so share factor and scale.
        fold: see :class:`Fold`.
        folded_into: the module whose parameters took the factor, or None.
        why: why the factor went no further towards the producer of the tensor.
    """

    name: str
    int8: bool
    in_features: int
    out_features: int
    reason: str | None = None
    activation: str | None = None
    group: tuple[str, ...] = ()
    fold: Fold = Fold.NONE
    folded_into: str | None = None
    why: str | None = None

    def __post_init__(self) -> None:
        if self.int8 == (self.reason is not None):
            raise ValueError(f"site {self.name}: a reason is for kept Linears, and only for them")

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-serialisable fields."""
        return {**dataclasses.asdict(self), "group": list(self.group), "fold": self.fold.value}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Site:
        """Undo :meth:`to_dict`."""
        return cls(**{**values, "group": tuple(values["group"]), "fold": Fold(values["fold"])})


def site_notes(model: nn.Module) -> dict[str, str]:
    """Reasons of the Linears that convert() kept in float, by name; empty for a float model."""
    sites = getattr(model, SITES_ATTRIBUTE, ())
    return {site["name"]: site["reason"] for site in sites if site["reason"] is not None}
