"""Operations whose products have a simulated accumulator, as calls of one operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from qinductor.errors import ConfigError

from .accumulate import accumulate
from .accumulator import Accumulator
from .convolution import convolution
from .operations import Form, Role


class Accumulated:
    """What stands for a matmul-like callee: the same arguments, the same result's shape."""

    __module__ = __name__

    def __init__(self, form: Form, site: str, accumulator: Accumulator) -> None:
        self.form, self.site, self.accumulator = form, site, accumulator
        self.__name__ = self.__qualname__ = f"accumulated_{form.operation}"

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The operation's result."""
        named = {}
        taken = set()
        for operand in self.form.operands:
            if operand.position < len(args):
                named[operand.role] = args[operand.position]
                taken.add(operand.position)
            else:
                named[operand.role] = kwargs.pop(operand.keyword, None)
        rest = [a for i, a in enumerate(args) if i not in taken]
        x, w, bias = (named.get(r) for r in (Role.INPUT, Role.WEIGHT, Role.BIAS))
        assert isinstance(x, Tensor) and isinstance(w, Tensor)
        if x.dtype != w.dtype or torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            if not torch.is_autocast_enabled(x.device.type):
                dtype = torch.promote_types(x.dtype, w.dtype)
            x, w = x.to(dtype), w.to(dtype)
        if self.form.operation.startswith("conv"):
            return convolution(self.site, self.accumulator, x, w, bias, *rest, **kwargs)
        if rest or any(v != 1 for v in kwargs.values()):
            raise ConfigError(
                f"{self.site}: an accumulator is not simulated with the arguments {rest} {kwargs}."
            )
        y = self._product(x, w.t() if self.form.operation == "linear" else w)
        return y if bias is None else y + bias.to(y.dtype)

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        """torch.matmul's rules for shapes."""
        if b.dim() == 1:
            return self._product(a, b[:, None]).squeeze(-1)
        if a.dim() == 1:
            return self._product(a[None], b).squeeze(-2)
        if b.dim() == 2:
            flat = accumulate(a.reshape(-1, a.shape[-1]), b, self.accumulator)
            return flat.reshape(*a.shape[:-1], b.shape[1])
        lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        left = a.expand(*lead, *a.shape[-2:]).flatten(0, -3)
        right = b.expand(*lead, *b.shape[-2:]).flatten(0, -3)
        y = accumulate(left, right, self.accumulator)
        return y.reshape(*lead, *y.shape[1:])


def accumulated(
    site: str,
    accumulator: Accumulator,
    form: Form,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call, or with proxies write, an operation with its accumulator."""
    function = Accumulated(form, site, accumulator)
    proxy = next((a for a in (*args, *kwargs.values()) if isinstance(a, fx.Proxy)), None)
    if proxy is not None:
        return proxy.tracer.create_proxy("call_function", function, tuple(args), dict(kwargs))
    return function(*args, **kwargs)
