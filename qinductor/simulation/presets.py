"""Recipes by name. Each is a list of rules that a user could have written.

Blocks lie along the dimension that the forward product sums over: the last one of a Linear's
operands, the channels of a convolution's, the first of a matmul's two of its second operand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qinductor.errors import UnknownOptionError
from qinductor.numerics.format_base import Format
from qinductor.numerics.formats import FixedPoint, FloatingPoint, Nans
from qinductor.numerics.named import BF16, DLFLOAT16, E4M3, E5M2, FP16, NAMED_MX, NVFP4_E2M1
from qinductor.numerics.rounding import Rounding
from qinductor.numerics.scaled import MX, NVFP4, BlockFloatingPoint, Granularity, Integer

from .accumulator import Accumulator
from .spec import Precision, Rule, SimulationSpec

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
PRODUCTS = ("matmul", "bmm", "sdpa_qk", "sdpa_pv")
LAYERS = ("linear", *CONVOLUTIONS)


def _layers(
    forward: Format | Precision,
    backward: Format | Precision,
    ops: tuple[str, ...] = LAYERS,
    **more: Any,
) -> Rule:
    return Rule(op=ops, optional=True, input=forward, weight=forward, grad_output=backward, **more)


def _along(forward: MX | NVFP4, backward: MX | NVFP4) -> tuple[Rule, ...]:
    """Rules for a format whose blocks lie along an axis."""
    return (
        _layers(forward, backward, ("linear",)),
        _layers(forward.replace(axis=1), backward.replace(axis=1), CONVOLUTIONS),
        Rule(
            op=PRODUCTS,
            optional=True,
            input=forward,
            weight=forward.replace(axis=-2),
            grad_output=backward,
        ),
    )


def _fp8() -> tuple[Rule, ...]:
    """Micikevicius et al., FP8 Formats for Deep Learning (2022): E4M3 forward, E5M2 backward."""
    return (_layers(E4M3, E5M2, (*LAYERS, *PRODUCTS)),)


def _everywhere(fmt: Format) -> tuple[Rule, ...]:
    """Every operand, result and gradient in one format."""
    roles = ("input", "weight", "output", "grad_output", "grad_input", "grad_weight")
    everything: dict[str, Any] = dict.fromkeys(roles, fmt)
    return (Rule(op=(*LAYERS, *PRODUCTS), optional=True, **everything),)


def _mx(forward: str, backward: str) -> tuple[Rule, ...]:
    """OCP Microscaling Formats v1.0."""
    return _along(NAMED_MX[forward], NAMED_MX[backward])


def _nvfp4() -> tuple[Rule, ...]:
    """E2M1 in blocks of 16; gradients rounded stochastically."""
    forward = NVFP4_E2M1
    rules = _along(forward, forward)
    stochastic = Precision(forward, Rounding.STOCHASTIC)
    conv = Precision(forward.replace(axis=1), Rounding.STOCHASTIC)
    return (
        *rules,
        Rule(op=("linear", *PRODUCTS), optional=True, grad_output=stochastic),
        Rule(op=CONVOLUTIONS, optional=True, grad_output=conv),
    )


def _int8() -> tuple[Rule, ...]:
    """Symmetric int8: a scale a tensor for activations, a scale an output channel for weights."""
    tensor = Integer(8)
    channel = Integer(8, granularity=Granularity.PER_CHANNEL, axis=0)
    gradient = Precision(tensor, Rounding.STOCHASTIC)
    return (Rule(op=LAYERS, optional=True, input=tensor, weight=channel, grad_output=gradient),)


def _block8() -> tuple[Rule, ...]:
    """8-bit block floating point, one exponent a tensor; gradients stochastic."""
    block = BlockFloatingPoint(8)
    return (_layers(block, Precision(block, Rounding.STOCHASTIC)),)


def _wage() -> tuple[Rule, ...]:
    """Wu et al., Training and Inference with Integers (2018): 2, 8, 8, 8 bits.

    The errors' shift to the largest power of two is a block exponent of the whole tensor; gradients
    and the weights' own 8-bit copy belong to :class:`qinductor.optim.LowPrecision`.
    """
    activation = FixedPoint(8, 7, symmetric=True)
    return (
        Rule(
            op=LAYERS,
            optional=True,
            input=activation,
            weight=Precision(FixedPoint(2, 1, symmetric=True), backward="identity"),
            grad_output=Precision(BlockFloatingPoint(8), Rounding.STOCHASTIC),
        ),
    )


def _swalp() -> tuple[Rule, ...]:
    """Yang et al., SWALP (2019): 8-bit blocks, everything stochastic."""
    block = Precision(BlockFloatingPoint(8), Rounding.STOCHASTIC)
    return (_layers(block, block, output=block),)


def _ibm8() -> tuple[Rule, ...]:
    """Wang et al., Training DNNs with 8-bit Floating Point Numbers (2018): 1-5-2, chunks of 64."""
    eight = FloatingPoint(5, 2, nans=Nans.NONE, saturate=True)
    accumulator = Accumulator(DLFLOAT16, chunk=64)
    return (_layers(eight, eight, accumulator=accumulator),)


PRESETS: dict[str, Callable[[], tuple[Rule, ...]]] = {
    "fp8": _fp8,
    "mxfp8": lambda: _mx("MXFP8_E4M3", "MXFP8_E5M2"),
    "mxfp6": lambda: _mx("MXFP6_E2M3", "MXFP6_E3M2"),
    "mxfp4": lambda: _mx("MXFP4", "MXFP4"),
    "nvfp4": _nvfp4,
    "int8": _int8,
    "bf16": lambda: _everywhere(BF16),
    "fp16": lambda: _everywhere(FP16),
    "block8": _block8,
    "wage": _wage,
    "swalp": _swalp,
    "ibm8": _ibm8,
}


def preset(name: str, **changes: Any) -> SimulationSpec:
    """The spec of a preset; ``changes`` are fields of :class:`SimulationSpec`, such as ``seed``.

    Raises:
        UnknownOptionError: there is no preset of that name.
    """
    if name not in PRESETS:
        raise UnknownOptionError("preset", name, PRESETS)
    return SimulationSpec(**{"rules": PRESETS[name](), "name": name, **changes})
