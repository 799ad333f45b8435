"""The named formats. Adding one is adding a constant to this file; the tests run over all."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable

from qinductor.errors import ConfigError

from . import formats, scaled
from .format_base import Format
from .formats import FixedPoint, FloatingPoint, Nans, Posit, Table
from .qpytorch import QTorchBlock, QTorchFixed, QTorchFloat
from .scaled import MX, NVFP4, BlockFloatingPoint, Integer, ScaleFormat

# OCP 8-bit Floating Point Specification, revision 1.0: saturating conversion.
E4M3 = FloatingPoint(4, 3, nans=Nans.TOP_CODE, saturate=True, name="E4M3")
E5M2 = FloatingPoint(5, 2, saturate=True, name="E5M2")
# Noune et al., 8-bit Numerical Formats for Deep Neural Networks (2022): one NaN, no -0.
E4M3FNUZ = FloatingPoint(4, 3, bias=8, nans=Nans.NEGATIVE_ZERO, saturate=True, name="E4M3FNUZ")
E5M2FNUZ = FloatingPoint(5, 2, bias=16, nans=Nans.NEGATIVE_ZERO, saturate=True, name="E5M2FNUZ")
E3M4 = FloatingPoint(3, 4, saturate=True, name="E3M4")
# OCP Microscaling Formats (MX) Specification, version 1.0.
E3M2 = FloatingPoint(3, 2, nans=Nans.NONE, saturate=True, name="E3M2")
E2M3 = FloatingPoint(2, 3, nans=Nans.NONE, saturate=True, name="E2M3")
E2M1 = FloatingPoint(2, 1, nans=Nans.NONE, saturate=True, name="E2M1")
# IEEE 754-2019 binary16, and the two truncations of binary32.
FP16 = FloatingPoint(5, 10, name="FP16")
BF16 = FloatingPoint(8, 7, name="BF16")
TF32 = FloatingPoint(8, 10, name="TF32")
# Agrawal et al., DLFloat: A 16-b Floating Point Format (ARITH 2019): one NaN-infinity, no
# subnormals, the lowest binade is normal. IBM's onnx-mlir (NNPALimit.hpp) has the same set:
# 2^(e-31)·(1 + m/512), e from 0, zero at e = m = 0, NaN-infinity at the last code.
DLFLOAT16 = FloatingPoint(
    6, 9, subnormals=False, zero_binade=True, nans=Nans.TOP_CODE, name="DLFLOAT16"
)

MXFP8_E4M3 = MX(E4M3, name="MXFP8_E4M3")
MXFP8_E5M2 = MX(E5M2, name="MXFP8_E5M2")
MXFP6_E3M2 = MX(E3M2, name="MXFP6_E3M2")
MXFP6_E2M3 = MX(E2M3, name="MXFP6_E2M3")
MXFP4 = MX(E2M1, name="MXFP4")
MXINT8 = MX(FixedPoint(8, 6, symmetric=True), name="MXINT8")
NVFP4_E2M1 = NVFP4(name="NVFP4_E2M1")

INT8 = Integer(8, name="INT8")
INT4 = Integer(4, name="INT4")
POSIT8 = Posit(8, 2, name="POSIT8")
POSIT16 = Posit(16, 2, name="POSIT16")

E8M0 = ScaleFormat(name="E8M0")

NAMED_FLOATS: dict[str, FloatingPoint] = {
    f.name: f
    for f in (
        *(E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E3M4, E3M2, E2M3, E2M1),
        *(FP16, BF16, TF32, DLFLOAT16),
    )
}
NAMED_MX: dict[str, MX] = {
    f.name: f for f in (MXFP8_E4M3, MXFP8_E5M2, MXFP6_E3M2, MXFP6_E2M3, MXFP4, MXINT8)
}
NAMED: dict[str, Format] = {
    **NAMED_FLOATS,
    **NAMED_MX,
    **{f.name: f for f in (NVFP4_E2M1, INT8, INT4, POSIT8, POSIT16)},
}
"""Every named format that quantize() takes."""

_CLASSES: dict[str, Callable[..., Format]] = {
    c.__name__: c
    for c in (
        *(FloatingPoint, FixedPoint, Posit, Table, BlockFloatingPoint, MX, NVFP4, Integer),
        *(QTorchFixed, QTorchFloat, QTorchBlock),
    )
}
_ENUMS = {e.__name__: e for e in (Nans, formats.Overflow, scaled.ScaleRule, scaled.Granularity)}


@functools.lru_cache(maxsize=1024)
def parse_format(key: str) -> Format:
    """Read a format's ``repr`` or a name of :data:`NAMED` back: ``parse_format("E4M3")``.

    Raises:
        ConfigError: the text is neither.
    """
    if key in NAMED:
        return NAMED[key]
    try:
        value = _evaluate(ast.parse(key, mode="eval").body)
    except (SyntaxError, KeyError, TypeError, LookupError) as error:
        raise ConfigError(
            f"{key!r} is not a format. Valid: {', '.join(NAMED)}, or an expression such as "
            "FloatingPoint(exp=4, man=3)."
        ) from error
    if not isinstance(value, Format):
        raise ConfigError(f"{key!r} is not a format. Valid: {', '.join(NAMED)}.")
    return value


def _evaluate(node: ast.expr) -> object:
    match node:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            named = {str(k.arg): _evaluate(k.value) for k in keywords}
            return _CLASSES[name](*(_evaluate(a) for a in args), **named)
        case ast.Attribute(value=ast.Name(id=owner), attr=member):
            return _ENUMS[owner][member]
        case ast.Tuple(elts=elements):
            return tuple(_evaluate(e) for e in elements)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _evaluate(operand)
            return -value  # type: ignore[operator]
        case ast.Constant(value=value):
            return value
    raise LookupError(ast.dump(node))
