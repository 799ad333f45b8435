"""Arithmetic of the operators as Inductor IR, rounded as their definitions say on every device.

C++ is compiled without contraction. Triton contracts a product and a sum into one rounding unless
the product says that it is rounded, and divides approximately unless told not to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor import lowering as L
from torch._inductor.virtualized import ops

from ..activations import GELU_COEFFICIENTS, GELU_LIMIT, GELU_SEGMENTS_PER_UNIT
from ..compat import rounded_quotient

aten = torch.ops.aten


def apply(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply the lowering of an aten overload."""
    return L.lowerings[op](*args, **kwargs)


def _is_cpu(node: Any) -> bool:
    return bool(node.get_device().type == "cpu")


def product(a: Any, b: Any) -> Any:
    """fl(a * b) of two float32 nodes, whatever is done with it next."""
    if _is_cpu(a):
        return apply(aten.mul.Tensor, a, b)
    return L.make_pointwise(lambda x, y: ops.mul_rn(x, y))(*L.broadcast_tensors(a, b))


def quotient(a: Any, divisor: float) -> Any:
    """fl(a / divisor), float32."""
    if _is_cpu(a):
        return apply(aten.div.Tensor, a, divisor)
    return L.make_pointwise(lambda x: rounded_quotient(x, ops.constant(divisor, torch.float32)))(a)


def reciprocal(a: Any) -> Any:
    """fl(1 / a), float32."""
    if _is_cpu(a):
        return apply(aten.reciprocal.default, a)
    return L.make_pointwise(lambda x: rounded_quotient(ops.constant(1.0, torch.float32), x))(a)


def codes(x: Any, inverse_scale: Any, zero_point: Any) -> Any:
    """Clamp(RNE(x * inverse_scale) + zero_point, 0, 255) as uint8; a NaN becomes 0. x: float32."""
    code = apply(aten.round.default, product(x, inverse_scale))
    code = apply(aten.add.Tensor, code, zero_point)
    code = apply(aten.where.self, apply(aten.ge.Scalar, code, 0.0), code, 0.0)
    return L.to_dtype(apply(aten.minimum.default, code, 255.0), torch.uint8)


def gelu(x: Any) -> Any:
    """The polynomial of :func:`qinductor.activations.gelu`, float32."""
    return L.make_pointwise(_gelu)(x)


def _gelu(x: Any) -> Any:
    def constant(number: float) -> Any:
        return ops.constant(number, torch.float32)

    magnitude = ops.abs(x)
    limited = ops.minimum(magnitude, constant(GELU_LIMIT))
    u = ops.mul_rn(limited, constant(_float32(GELU_SEGMENTS_PER_UNIT)))
    # A NaN's segment does not matter, its fraction is NaN; it only has to be a number.
    is_number = ops.eq(x, x)
    segment = ops.to_dtype(ops.where(is_number, u, constant(0.0)), torch.int32)
    f = ops.sub(u, ops.to_dtype(segment, torch.float32))
    bits = [
        ops.ne(ops.bitwise_and(segment, ops.constant(1 << bit, torch.int32)), _zero())
        for bit in range(4)
    ]

    def coefficient(power: int) -> Any:
        values: list[Any] = [constant(row[power]) for row in GELU_COEFFICIENTS]
        for bit in bits:  # the lowest bit first: neighbours are merged
            values = [
                ops.where(bit, high, low)
                for low, high in zip(values[::2], values[1::2], strict=True)
            ]
        return values[0]

    q = coefficient(4)
    for power in (3, 2, 1, 0):
        q = ops.add(ops.mul_rn(q, f), coefficient(power))
    return ops.add(ops.mul_rn(x, constant(0.5)), ops.mul_rn(magnitude, q))


def _zero() -> Any:
    return ops.constant(0, torch.int32)


def _float32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32))


_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "none": lambda y: y,
    "relu": lambda y: apply(aten.relu.default, y),
    "gelu": gelu,
    "gelu_tanh": lambda y: apply(aten.gelu.default, y, approximate="tanh"),
    "silu": lambda y: apply(aten.silu.default, y),
    "tanh": lambda y: apply(aten.tanh.default, y),
}


def activation(y: Any, name: str) -> Any:
    """Apply a key of :data:`qinductor.activations.ACTIVATIONS` to a float32 node."""
    return _ACTIVATIONS[name](y)
