"""Rounding tensors in place, each at a site of its own, reproducibly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qinductor.errors import ConfigError
from qinductor.numerics.format_base import Format
from qinductor.numerics.quantize import quantize
from qinductor.numerics.random_bits import site_hash
from qinductor.numerics.rounding import Rounding
from qinductor.simulation.spec import Precision, as_rounding

Given = Precision | Format | str | None
"""What a user gives for a tensor's precision."""


def precision(name: str, given: Given, rounding: Rounding | str) -> Precision | None:
    """A Precision; ``rounding`` counts where ``given`` is a format alone.

    Raises:
        ConfigError: it is none; the message names the argument.
    """
    if given is None or isinstance(given, Precision):
        return given
    try:
        return Precision(given, as_rounding(rounding))  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


class Rounder:
    """Seed and step, as tensors, and what rounds with them.

    Random bits belong to (seed, step, tensor number, role): not to the rank, so that data-parallel
    replicas stay equal.
    """

    def __init__(self, seed: int | None) -> None:
        drawn = torch.randint(0, 2**62, ()) if seed is None else torch.tensor(seed)
        self.seed: Tensor = drawn.to(torch.int64)
        self.step: Tensor = torch.zeros((), dtype=torch.int64)

    def __call__(
        self, x: Tensor, p: Precision | None, number: int, role: str, call: int = 0
    ) -> None:
        """Round ``x`` in place; a sparse tensor's values."""
        if p is None:
            return
        if not x.is_floating_point():
            raise ConfigError(
                f"{role} of parameter {number} is {x.dtype}: formats are for floating-point "
                "tensors. Put it in a parameter group with low_precision=False."
            )
        x = x.detach()
        if x.is_sparse:
            x = x._values()
        options: dict[str, Any] = {}
        if p.stochastic:
            site = site_hash(f"parameter {number}", "optimizer", role, call)
            options = {"seed": self.seed, "step": self.step, "site": site}
        quantize(x, p.format, p.rounding, random_bits=p.random_bits, out=x, **options)

    def advance(self) -> None:
        """Count one step."""
        self.step = self.step + 1

    def state_dict(self) -> dict[str, Tensor]:
        """Seed and step."""
        return {"seed": self.seed.clone(), "step": self.step.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """The inverse."""
        self.seed, self.step = state["seed"].clone(), state["step"].clone()
