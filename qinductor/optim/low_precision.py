"""LowPrecision: any torch optimizer with rounded gradients, states, weights and master weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from qinductor.errors import ConfigError
from qinductor.numerics.rounding import Rounding
from qinductor.simulation.handle import Simulation
from qinductor.simulation.spec import Precision

from .roundings import Given, Rounder, precision

FULL = "full"
"""An accumulator in the parameter's own dtype, not rounded."""
_KEY = "low_precision"


class LowPrecision(Optimizer):
    """Run an optimizer as hardware with low-precision storage would.

    One step: g ← Q_gradient(g · grad_scaling); the optimizer's own step on the accumulator (the
    master copy of the weights) where there is one, else on the weights; its states are rounded by
    Q_momentum, the accumulator by Q_accumulator, and the weights are Q_weight of that. Nothing is
    rounded before the first step; :meth:`round_weights` does it at once.

    Closures (LBFGS too) are evaluated at rounded weights. ``foreach`` and ``fused`` are the inner
    optimizer's business: they change nothing here. With a GradScaler the gradients are unscaled
    before they are rounded, for fused optimizers as well. A parameter group with
    ``low_precision=False`` is left in full precision.

    Args:
        optimizer: any ``torch.optim`` optimizer.
        weight, gradient, momentum, accumulator: a :class:`~qinductor.Precision`, a format or its
            name, or None: not rounded. ``momentum`` is for every floating-point state tensor but
            scalars, or a mapping by the state's name (``{"exp_avg": "FP16"}``). ``accumulator``
            None: no master copy; "full": one that is not rounded.
        grad_scaling: factor on the gradients before they are rounded.
        rounding: the mode of what is given as a format alone.
        seed: of stochastic rounding; None draws one from torch's generator.
        simulation: a handle of :func:`qinductor.simulate` whose state is saved and loaded too.

    Raises:
        ConfigError: the optimizer is wrapped already or is none; a format is not valid.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        weight: Given = None,
        gradient: Given = None,
        momentum: Given | Mapping[str, Given] = None,
        accumulator: Given = None,
        grad_scaling: float = 1.0,
        rounding: Rounding | str = Rounding.TIES_TO_EVEN,
        seed: int | None = None,
        simulation: Simulation | None = None,
    ) -> None:
        if isinstance(optimizer, LowPrecision):
            raise ConfigError(
                "LowPrecision was given an optimizer that is wrapped already. Give it the inner "
                "one (wrapped.optimizer) with all the formats at once."
            )
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(f"LowPrecision wraps a torch.optim.Optimizer, not {optimizer!r}.")
        if not grad_scaling > 0:
            raise ConfigError(f"grad_scaling={grad_scaling!r} must be positive.")
        self.optimizer = optimizer
        self.weight = precision("weight", weight, rounding)
        self.gradient = precision("gradient", gradient, rounding)
        self.has_accumulator = accumulator is not None
        self.accumulator = (
            None if accumulator == FULL else precision("accumulator", accumulator, rounding)
        )
        self.momentum: Precision | Mapping[str, Precision | None] | None
        if isinstance(momentum, Mapping):
            self.momentum = {
                k: precision(f"momentum[{k!r}]", v, rounding) for k, v in momentum.items()
            }
        else:
            self.momentum = precision("momentum", momentum, rounding)
        self.grad_scaling = float(grad_scaling)
        self.simulation = simulation
        self._rounder = Rounder(seed)
        self._masters: dict[int, Tensor] = {}
        # What torch's own subclasses get from Optimizer.__init__, without a second set of groups.
        self.defaults = optimizer.defaults
        self.__setstate__({})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's states."""
        return self.optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def _parameters(self) -> Iterator[tuple[int, Tensor]]:
        """(number, parameter) of what is rounded; numbers count all parameters."""
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if group.get(_KEY, True):
                    yield number, parameter
                number += 1

    @torch.no_grad()
    def round_weights(self) -> None:
        """Round the weights now, so that the first forward pass meets rounded ones."""
        self._start_accumulators()
        for number, parameter in self._parameters():
            self._rounder(parameter, self.weight, number, "weight")
        self._rounder.advance()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimization step. ``closure`` evaluates the model and returns the loss."""
        with torch.no_grad():
            self._start_accumulators()
            weights = {n: p.clone() for n, p in self._parameters()} if self._masters else {}
            if closure is None:
                self._round_gradients(0)
            for number, parameter in self._parameters():
                if number in self._masters:
                    parameter.copy_(self._masters[number])
        if closure is None:
            self.optimizer.step()
            loss = None
        else:
            loss = self.optimizer.step(self._rounded(closure, weights))
        with torch.no_grad():
            self._finish()
        return loss

    def _start_accumulators(self) -> None:
        if self.has_accumulator:
            for number, parameter in self._parameters():
                if number not in self._masters:
                    self._masters[number] = parameter.detach().clone()
                    self._rounder(self._masters[number], self.accumulator, number, "accumulator")

    def _round_gradients(self, call: int) -> None:
        for number, parameter in self._parameters():
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
            if self.grad_scaling != 1.0:
                parameter.grad.mul_(self.grad_scaling)
            self._rounder(parameter.grad, self.gradient, number, "gradient", call)

    def _rounded(self, closure: Callable[[], Any], weights: dict[int, Tensor]) -> Callable[[], Any]:
        """The closure at rounded weights; first at those of the last step, then at trial points."""
        calls = 0

        def evaluate() -> Any:
            nonlocal calls
            with torch.no_grad():
                exact = {n: p.clone() for n, p in self._parameters()} if self._masters else {}
                for number, parameter in self._parameters():
                    if calls:
                        self._rounder(parameter, self.weight, number, "weight", calls)
                    elif number in weights:
                        parameter.copy_(weights[number])
            with torch.enable_grad():
                loss = closure()
            with torch.no_grad():
                self._round_gradients(calls)
                for number, parameter in self._parameters():
                    if number in exact:
                        parameter.copy_(exact[number])
            calls += 1
            return loss

        return evaluate

    def _finish(self) -> None:
        """Round what the inner optimizer has written."""
        for number, parameter in self._parameters():
            self._round_states(number, parameter)
            if number in self._masters:
                self._rounder(parameter, self.accumulator, number, "accumulator")
                self._masters[number].copy_(parameter)
            self._rounder(parameter, self.weight, number, "weight")
        self._rounder.advance()

    def _round_states(self, number: int, parameter: Tensor) -> None:
        if self.momentum is None or parameter not in self.state:
            return
        states = {
            name: value
            for name, value in self.state[parameter].items()
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim()
        }
        if isinstance(self.momentum, Mapping):
            for name in self.momentum:
                if states and name not in self.state[parameter]:
                    raise ConfigError(
                        f"momentum names the state {name!r}, which {type(self.optimizer).__name__} "
                        f"does not keep. It keeps: {', '.join(states)}."
                    )
            for name, chosen in self.momentum.items():
                if name in states:
                    self._rounder(states[name], chosen, number, name)
            return
        for name, value in states.items():
            self._rounder(value, self.momentum, number, name)

    def recipe(self) -> dict[str, str]:
        """What rounds what, as text."""
        momentum = self.momentum
        if isinstance(momentum, Mapping):
            momentum_text = ", ".join(f"{k}: {_text(v)}" for k, v in sorted(momentum.items()))
        else:
            momentum_text = _text(momentum)
        accumulator = _text(self.accumulator) if self.accumulator else FULL
        return {
            "optimizer": type(self.optimizer).__name__,
            "weight": _text(self.weight),
            "gradient": _text(self.gradient),
            "momentum": momentum_text,
            "accumulator": accumulator if self.has_accumulator else "none",
            "grad_scaling": str(self.grad_scaling),
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, the simulation's seed and step included."""
        state = {
            "optimizer": self.optimizer.state_dict(),
            "recipe": self.recipe(),
            "rounding": self._rounder.state_dict(),
            "masters": {n: m.clone() for n, m in self._masters.items()},
        }
        if self.simulation is not None:
            state["simulation"] = self.simulation.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on, bit for bit, where :meth:`state_dict` was taken.

        Raises:
            ConfigError: it is an unwrapped optimizer's, or of another recipe.
        """
        for key in ("optimizer", "recipe", "rounding", "masters"):
            if key not in state_dict:
                raise ConfigError(
                    f"this state_dict has no {key!r}: it is not LowPrecision's. Load an unwrapped "
                    "optimizer's state into wrapped.optimizer."
                )
        mine = self.recipe()
        for key, saved in state_dict["recipe"].items():
            if mine.get(key) != saved:
                raise ConfigError(
                    f"the state_dict was saved with {key}={saved}; this optimizer has "
                    f"{mine.get(key)}. Make it the same, or start a new run."
                )
        if (self.simulation is not None) != ("simulation" in state_dict):
            has = "holds" if "simulation" in state_dict else "lacks"
            raise ConfigError(
                f"the state_dict {has} the state of a simulation; give LowPrecision simulation=... "
                "when it is saved and when it is loaded, or neither time."
            )
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self._rounder.load_state_dict(state_dict["rounding"])
        devices = {n: p.device for n, p in self._parameters()}
        self._masters = {
            n: m.detach().to(devices.get(n, m.device), copy=True)
            for n, m in state_dict["masters"].items()
        }
        if self.simulation is not None:
            self.simulation.load_state_dict(state_dict["simulation"])

    def __repr__(self) -> str:
        rounded = ", ".join(f"{k}={v}" for k, v in self.recipe().items() if v != "none")
        return f"LowPrecision({rounded})"


def _text(p: Precision | None) -> str:
    return "none" if p is None else f"{p.format.key} {p.rounding.name} {p.random_bits}"
