"""QPyTorch's OptimLP: an optimizer whose weights, gradients and state are quantized."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from qinductor.errors import ConfigError

__all__ = ["OptimLP"]

Quant = Callable[[Tensor], Tensor]

ACCUMULATORS = "weight_acc"
"""Key of the accumulators in the state_dict, in the order of the parameters."""


class OptimLP(Optimizer):
    """Wrap an optimizer: quantize gradients, step on the accumulators, quantize what it wrote.

    A step is: gradient ← grad_quant(grad_scaling·gradient); the inner optimizer's step, on the
    accumulators where there are any; accumulator ← acc_quant(accumulator);
    weight ← weight_quant(accumulator); momentum ← momentum_quant(momentum).

    Beyond QPyTorch's: any optimizer, not SGD and Adam only (its momentum is the state of a
    parameter's shape); grad_scaling also without grad_quant; step(closure); state_dict() holds
    the inner optimizer's state and the accumulators, so that a resumed run goes on alike.

    Args:
        optim: the inner optimizer; its param_groups are shared, so schedulers work on either.
        weight_quant, grad_quant, momentum_quant, acc_quant: functions tensor → tensor, or None.
            With acc_quant, full-precision copies of the weights are kept as accumulators.
        grad_scaling: positive factor of the gradient.

    Raises:
        ConfigError: (a ValueError) optim is no optimizer, or grad_scaling is not positive.
    """

    def __init__(
        self,
        optim: Optimizer,
        weight_quant: Quant | None = None,
        grad_scaling: float = 1.0,
        grad_quant: Quant | None = None,
        momentum_quant: Quant | None = None,
        acc_quant: Quant | None = None,
    ) -> None:
        if not isinstance(optim, Optimizer):
            raise ConfigError(
                f"optim={optim!r} must be a torch.optim optimizer, for example SGD(...)."
            )
        if not grad_scaling > 0:
            raise ConfigError(f"grad_scaling={grad_scaling} must be positive.")
        super().__init__(optim.param_groups, optim.defaults)
        self.optim = optim
        self._share()
        self.grad_scaling = grad_scaling
        self.weight_quant, self.grad_quant = weight_quant, grad_quant
        self.momentum_quant, self.acc_quant = momentum_quant, acc_quant
        self.weight_acc: dict[Tensor, Tensor] = {}
        if acc_quant is not None:
            self.weight_acc = {p: p.detach().clone() for p in self._parameters()}

    def _share(self) -> None:
        self.param_groups, self.state = self.optim.param_groups, self.optim.state

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the inner optimizer. Returns the closure's value, or the inner step's.

        ``closure`` is evaluated once, with the quantized weights, before anything else.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._quantize_gradients()
        if self.acc_quant is not None:
            for p in self._parameters():
                p.data = self.weight_acc[p]
        inner = self.optim.step()
        if self.acc_quant is not None:
            for p in self._parameters():
                self.weight_acc[p] = p.data = self.acc_quant(p.data)
        if self.weight_quant is not None:
            for p in self._parameters():
                p.data = self.weight_quant(p.data)
        self._quantize_momentum()
        return inner if closure is None else loss

    def _quantize_gradients(self) -> None:
        if self.grad_quant is None and self.grad_scaling == 1.0:
            return
        for p in self._parameters():
            if p.grad is None:
                continue
            scaled = p.grad * self.grad_scaling
            p.grad.data = scaled if self.grad_quant is None else self.grad_quant(scaled)

    def _quantize_momentum(self) -> None:
        if self.momentum_quant is None:
            return
        for p in self._parameters():
            state = self.state.get(p, {}) if p.grad is not None else {}
            for key, value in state.items():
                momentum = isinstance(value, Tensor) and value.is_floating_point()
                if momentum and value.dim() and value.shape == p.shape:
                    state[key] = self.momentum_quant(value)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and the accumulators."""
        held = [self.weight_acc[p] for p in self._parameters() if p in self.weight_acc]
        return {**self.optim.state_dict(), ACCUMULATORS: held}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what state_dict() gave; without accumulators in it, the weights become them.

        Raises:
            ConfigError: the number of accumulators is another.
        """
        held = state_dict.get(ACCUMULATORS, [])
        self.optim.load_state_dict({k: v for k, v in state_dict.items() if k != ACCUMULATORS})
        self._share()
        if self.acc_quant is None:
            return
        parameters = list(self._parameters())
        if held and len(held) != len(parameters):
            raise ConfigError(
                f"the state has {len(held)} accumulators, the optimizer {len(parameters)} "
                "parameters. Load it into an optimizer of the same model."
            )
        source = held or [p.detach() for p in parameters]
        self.weight_acc = {p: a.clone() for p, a in zip(parameters, source, strict=True)}

    def __repr__(self) -> str:
        return f"LP Optimizer: {self.optim!r}"
