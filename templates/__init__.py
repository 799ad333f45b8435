"""Code templates: what implements an operator on a device, best first.

An implementation is usable where the machine has its instruction set and its ``supports`` accepts
the arguments. The first usable one is taken; where there is none, the operator's eager body runs.
"""

from __future__ import annotations

if __name__ == "templates":
    raise ImportError("import qinductor.templates, not templates: a second registry would load")

from ..capability import Isa
from .base import GpuImplementation, Implementation

_GEMM = (
    (Isa.AVX512_VNNI, "int8_gemm_avx512_vnni.h", "Avx512Vnni"),
    (Isa.AVX2, "int8_gemm_avx2.h", "Avx2"),
    (Isa.PORTABLE, "int8_gemm_portable.h", "Portable"),
)


def _int8(op: str, *more: str) -> tuple[Implementation, ...]:
    """The int8 GEMMs, with the files that an operator needs besides."""
    return tuple(
        Implementation(op, isa, ("int8_gemm.h", file, *more), cpp_class)
        for isa, file, cpp_class in _GEMM
    )


TEMPLATES: dict[tuple[str, str], tuple[Implementation, ...]] = {
    ("qlinear", "cpu"): _int8("qlinear"),
    ("qlinear_merged", "cpu"): _int8("qlinear_merged"),
    ("qlinear_rows", "cpu"): _int8("qlinear_rows", "scratch.h", "int8_rows.h"),
    ("attention", "cpu"): (
        Implementation(
            "attention",
            Isa.AVX512_VNNI,
            ("int8_gemm.h", "int8_gemm_avx512_vnni.h", "scratch.h", "attention_avx512_bf16.h"),
            "Avx512Bf16Attention",
            needs_bf16=True,
            operands="bf16_bf16",
        ),
    ),
}
"""(operator, device type) → implementations, in the order in which they are tried."""

GPU_TEMPLATES: dict[str, tuple[GpuImplementation, ...]] = {
    "qlinear": (GpuImplementation("qlinear", "s8"),),
    "fp8_linear": (GpuImplementation("fp8_linear", "fp8"),),
}
"""Operator → implementations on CUDA devices."""
