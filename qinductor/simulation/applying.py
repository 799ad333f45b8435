"""Rounding around one operation: the code that eager execution and graph rewriting share.

Tensors may be :class:`torch.fx.Proxy`: the same lines then write nodes instead of computing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from qinductor.errors import ConfigError
from qinductor.numerics.op import fake_quantize
from qinductor.numerics.quantize import quantize
from qinductor.numerics.sources import SOURCE_DIGEST

from .gradient import round_gradient
from .handle import Place, Settings, Simulation, Site
from .operations import Form, Role
from .spec import Precision


@dataclass
class Pass:
    """One forward pass, or the part of it that a graph holds.

    Attributes:
        simulation: whose spec it follows.
        seed, step: tensors or proxies.
        rank: the data-parallel rank.
        calls: how often each (path, operation) was met so far.
        scope: prefix of the operation's name in sites, inside an operation that has several.
    """

    simulation: Simulation
    seed: Any
    step: Any
    rank: int = 0
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    scope: str = ""

    def next_call(self, place: Place, op: str) -> int:
        """Number of this call of an operation in its module."""
        key = (place.path, op)
        self.calls[key] += 1
        return self.calls[key] - 1

    def inside(self, scope: str) -> Pass:
        """A pass for the operations that one operation consists of."""
        return Pass(self.simulation, self.seed, self.step, self.rank, Counter(), scope)


def example(x: Any) -> Any:
    """A proxy's example value; a tensor itself."""
    return x.node.meta.get("example_value") if isinstance(x, fx.Proxy) else x


def is_float(x: Any) -> bool:
    """Whether x is, or stands for, a floating-point tensor."""
    value = example(x)
    return isinstance(value, Tensor) and value.is_floating_point()


def operate(callee: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function, or a method by its name."""
    if isinstance(callee, str):
        return getattr(args[0], callee)(*args[1:], **kwargs)
    return callee(*args, **kwargs)


def perform(
    run: Pass,
    place: Place,
    form: Form,
    callee: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call ``callee`` with what the spec says around it."""
    op = form.operation
    if op == "add" and not _is_residual(args, kwargs):
        return operate(callee, args, kwargs)
    call = run.next_call(place, op)
    settings = run.simulation.settings(place, op)
    if not settings:
        return operate(callee, args, kwargs)
    around = Around(run, place, op, call, settings)
    new_args, new_kwargs = list(args), dict(kwargs)
    for number, operand in enumerate(form.operands):
        label = "" if number == 0 or operand.role is not form.operands[0].role else str(number)
        if operand.position < len(args):
            new_args[operand.position] = around.operand(args[operand.position], operand.role, label)
        elif operand.keyword in kwargs:
            new_kwargs[operand.keyword] = around.operand(
                kwargs[operand.keyword], operand.role, label
            )
    if form.in_place is not None:
        result = around.result(form.in_place(*new_args, **new_kwargs))
        return args[0].copy_(result)
    if settings.accumulator is not None:
        from .products import accumulated

        run.simulation.number(around.site("accumulator"), settings.accumulator, 0)
        text = str(around.site("accumulator"))
        out = accumulated(text, settings.accumulator, form, new_args, new_kwargs)
    else:
        out = operate(callee, new_args, new_kwargs)
    return around.result(out)


def _is_residual(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a sum is of two float tensors of one shape."""
    both = [*args, kwargs.get("other")][:2]
    if not all(is_float(x) for x in both) or len(both) < 2:
        return False
    a, b = (example(x).shape for x in both)
    return len(a) == len(b) > 0 and all(_same(m, n) for m, n in zip(a, b, strict=True))


def _same(m: Any, n: Any) -> bool:
    if isinstance(m, int) and isinstance(n, int):
        return m == n
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(m == n))


@dataclass
class Around:
    """The roundings of one call."""

    run: Pass
    place: Place
    op: str
    call: int
    settings: Settings

    def operand(self, x: Any, role: Role, label: str = "") -> Any:
        """An operand as the operation reads it; its gradient is rounded last."""
        forward = self.settings.roles.get(role)
        gradient = role.gradient
        backward = self.settings.roles.get(gradient) if gradient is not None else None
        if x is None or (forward is None and backward is None):
            return x
        if not is_float(x):
            self._refuse(x, role)
            return x
        if backward is not None and gradient is not None:
            x = self._gradient(x, backward, gradient.value + label)
        return x if forward is None else self._forward(x, forward, role.value + label)

    def result(self, y: Any) -> Any:
        """What the operation returns; the arriving gradient is masked, then rounded."""
        roles = self.settings.roles
        if Role.GRAD_OUTPUT in roles:
            y = self._gradient(y, roles[Role.GRAD_OUTPUT], Role.GRAD_OUTPUT.value)
        if Role.OUTPUT in roles:
            y = self._forward(y, roles[Role.OUTPUT], Role.OUTPUT.value)
        return y

    def site(self, role: str) -> Site:
        """The site of a role here."""
        return Site(self.place.path, self.run.scope + self.op, role, self.call)

    def _refuse(self, x: Any, role: Role) -> None:
        value = example(x)
        dtype = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(
            f"{self.site(role.value)} is {dtype}: formats are for floating-point tensors. Give "
            f"this operation {role.value}=None in a later rule."
        )

    def _numbers(self, precision: Precision, role: str) -> tuple[Any, Any, int]:
        number = self.run.simulation.number(self.site(role), precision, self.run.rank)
        if not precision.stochastic:
            return None, None, number
        return self.run.seed, self.run.step, number

    def _watch(self, role: str, precision: Precision) -> Callable[[Tensor, Tensor], None] | None:
        watchers = self.run.simulation.watchers
        if not watchers:
            return None
        site = self.site(role)

        def tell(x: Tensor, q: Tensor) -> None:
            for watcher in watchers:
                watcher(site, precision, x, q)

        return tell

    def _forward(self, x: Any, p: Precision, role: str) -> Any:
        seed, step, site = self._numbers(p, role)
        if isinstance(x, fx.Proxy):
            q: Any = fake_quantize._opoverload(
                *(x, seed, step, p.format.key, p.rounding.name, site, p.random_bits, 0),
                *(p.backward == "mask", SOURCE_DIGEST),
            )
            return _described(q, x)
        q = quantize(
            x,
            p.format,
            p.rounding,
            seed=seed,
            site=site,
            step=0 if step is None else step,
            random_bits=p.random_bits,
            backward=p.backward,
        )
        if (watch := self._watch(role, p)) is not None:
            watch(x.detach(), q.detach())
        return q

    def _gradient(self, x: Any, p: Precision, role: str) -> Any:
        seed, step, site = self._numbers(p, role)
        if isinstance(x, fx.Proxy):
            y: Any = torch.ops.qinductor.quantize_gradient.default(
                *(x, seed, step, p.format.key, p.rounding.name, site, p.random_bits),
                SOURCE_DIGEST,
            )
            return _described(y, x)
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        options = (p.format.key, p.rounding.name, site, p.random_bits)
        return round_gradient(x, seed, step, options, self._watch(role, p))


def _described(new: fx.Proxy, like: fx.Proxy) -> fx.Proxy:
    if "example_value" in like.node.meta:
        new.node.meta["example_value"] = like.node.meta["example_value"]
    return new
