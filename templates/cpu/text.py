"""Pieces of C++ text that several templates write."""

from __future__ import annotations

import functools
from pathlib import Path

from ...activations import GELU_COEFFICIENTS, GELU_LIMIT, GELU_SEGMENTS_PER_UNIT
from ...attention import EXP2_COEFFICIENTS
from ..base import Implementation


@functools.cache
def source_text(name: str) -> str:
    """Return the text of a C++ file beside this module."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def sources(implementation: Implementation) -> str:
    """The C++ files of an implementation, one after the other."""
    return "".join(source_text(name) for name in implementation.sources)


def cpp_bool(value: bool) -> str:
    """Spell a truth value in C++."""
    return "true" if value else "false"


def tables() -> str:
    """The coefficients of the approximations as C++ constants."""
    columns = ",\n".join(
        "{" + ", ".join(f"{value!r}f" for value in column) + "}"
        for column in zip(*GELU_COEFFICIENTS, strict=True)
    )
    exp2 = ", ".join(f"{value!r}f" for value in EXP2_COEFFICIENTS)
    return f"""\
#ifndef QINDUCTOR_TABLES
#define QINDUCTOR_TABLES
namespace qinductor {{
constexpr float kGeluLimit = {GELU_LIMIT!r}f, kGeluSegmentsPerUnit = {GELU_SEGMENTS_PER_UNIT!r}f;
alignas(64) constexpr float kGelu[5][16] = {{
{columns}
}};
constexpr float kExp2[5] = {{{exp2}}};
}}
#endif
"""
