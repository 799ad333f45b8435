"""WeightAverage: the running mean of low-precision weights, itself in a format (SWALP)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from qinductor.errors import ConfigError
from qinductor.numerics.rounding import Rounding

from .roundings import Given, Rounder, precision


class WeightAverage:
    """w̄ ← Q((m·w̄ + w)/(m + 1)) over the weights at each :meth:`update`.

    Source: Yang et al., SWALP: Stochastic Weight Averaging in Low-Precision Training (ICML 2019).
    Batch norm statistics are not averaged: run training batches through the averaged model
    (``torch.optim.swa_utils.update_bn``).

    Args:
        model: whose parameters are averaged.
        format: of the average: a Precision, a format or a name; None: the parameters' own dtype.
        rounding: the mode where ``format`` is a format alone.
        seed: of stochastic rounding; None draws one.
    """

    def __init__(
        self,
        model: nn.Module,
        format: Given = None,
        *,
        rounding: Rounding | str = Rounding.TIES_TO_EVEN,
        seed: int | None = None,
    ) -> None:
        self.model = model
        self.precision = precision("format", format, rounding)
        self.count = 0
        self._rounder = Rounder(seed)
        self._average: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of now into the average."""
        for number, (name, parameter) in enumerate(self.model.named_parameters()):
            if name in self._average:
                mean = self._average[name]
                mean.mul_(self.count).add_(parameter).div_(self.count + 1)
            else:
                self._average[name] = mean = parameter.detach().clone()
            self._rounder(mean, self.precision, number, "average")
        self.count += 1
        self._rounder.advance()

    @contextlib.contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """The model with the average for its weights, inside a ``with`` block.

        Raises:
            ConfigError: nothing was averaged yet.
        """
        if not self.count:
            raise ConfigError("WeightAverage holds nothing yet: call update() first.")
        own = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._write(self._average)
        try:
            yield self.model
        finally:
            self._write(own)

    @torch.no_grad()
    def _write(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(weights[name])

    def state_dict(self) -> dict[str, Any]:
        """The average, its count, seed and step."""
        return {
            "average": {name: mean.clone() for name, mean in self._average.items()},
            "count": self.count,
            "format": str(self.precision),
            "rounding": self._rounder.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken.

        Raises:
            ConfigError: it is in another format, or of a model with other parameters.
        """
        if state["format"] != str(self.precision):
            raise ConfigError(
                f"the average was saved in {state['format']}; this one is in {self.precision}."
            )
        names = {name for name, _ in self.model.named_parameters()}
        if state["count"] and set(state["average"]) != names:
            other = sorted(names ^ set(state["average"]))
            raise ConfigError(f"the average is of a model with other parameters: {other[:5]}.")
        self.count = state["count"]
        self._average = {name: mean.clone() for name, mean in state["average"].items()}
        self._rounder.load_state_dict(state["rounding"])
