"""Every kernel with the GPUs it is compiled for in tests and in the table of docs/gpu.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...capability import Gpu
from ...numerics import FloatingPoint, Rounding
from .accumulator import FP32, accumulator_constants
from .machine_code import MachineCode, compile_for
from .tiles import choose_tile

Sm = tuple[int, int]
TARGETS: tuple[Sm, ...] = ((8, 0), (9, 0), (10, 0))
FP8_TARGETS: tuple[Sm, ...] = ((8, 9), (9, 0), (10, 0))


@dataclass(frozen=True)
class Kernel:
    """One row of the table for each of its targets.

    Attributes:
        name: as the table has it.
        compile: makes the code for a compute capability.
        targets: what it is compiled for.
        operands: what its tensor core instructions multiply; None without such instructions.
    """

    name: str
    compile: Callable[[Sm], MachineCode]
    targets: tuple[Sm, ...] = TARGETS
    operands: str | None = None


def _gemm(m: int, k: int, dtype: str) -> Callable[[Sm], MachineCode]:
    """Of M rows, 4096 columns and K, with the tile it would get."""

    def compile_gemm(sm: Sm) -> MachineCode:
        import triton.language as tl

        from .gemm_tile import gemm_kernel

        integers = dtype == "i8"
        operands = "s8" if integers else "fp8"
        tile = choose_tile(m, 4096, k, Gpu(sm), operands)
        pointers = {
            "a": f"*{dtype}",
            "b": f"*{dtype}",
            "out": "*i32" if integers else "*fp32",
        }
        sizes = ("M", "N", "K", "N_ROWS", "K_SPLIT", "stride_a", "stride_b")
        even = k % 16 == 0
        return compile_for(
            gemm_kernel,
            sm,
            {**pointers, **dict.fromkeys(sizes, "i32")},
            {
                "ACC": tl.int32 if integers else tl.float32,
                "OTHER": 0 if integers else 0.0,
                "BLOCK_M": tile.m,
                "BLOCK_N": tile.n,
                "BLOCK_K": tile.k,
                "GROUP_M": tile.group,
                "EVEN_K": k % tile.k == 0,
            },
            warps=tile.warps,
            stages=tile.stages,
            aligned=(
                "a",
                "b",
                "out",
                "N",
                "K_SPLIT",
                *(("K", "stride_a", "stride_b") if even else ()),
            ),
        )

    return compile_gemm


def _quantize_rows(producer: str, k: int) -> Callable[[Sm], MachineCode]:
    def compile_rows(sm: Sm) -> MachineCode:
        from .row_quantize import quantize_rows_kernel

        half, full = "*bf16", "*fp32"
        return compile_for(
            quantize_rows_kernel,
            sm,
            {
                "x": half, "multiplier": full, "weight": full, "bias": full, "table": full,
                "codes": "*u8", "scales": full, "produced": half, "K": "i32",
            },
            {
                "EPS": 1e-5, "DIVISOR": 127.0, "MIN_SCALE": 2.0**-126, "PRODUCER": producer,
                "HAS_MULTIPLIER": False, "HAS_BIAS": producer == "layer_norm",
                "STORE": producer == "layer_norm", "BLOCK": k,
            },
            warps=min(16, max(1, k // 512)),
            aligned=("x", "codes", "produced", "K"),
        )  # fmt: skip

    return compile_rows


def _accumulate(acc: FloatingPoint, chunk: int | None) -> Callable[[Sm], MachineCode]:
    def compile_accumulate(sm: Sm) -> MachineCode:
        from .accumulate import accumulate_kernel

        half = "*bf16"
        sizes = ("M", "N", "K", "stride_a", "stride_b")
        given = accumulator_constants(acc, None, chunk, FP32, Rounding.TIES_TO_EVEN)
        return compile_for(
            accumulate_kernel,
            sm,
            {"a": half, "b": half, "out": "*fp32", **dict.fromkeys(sizes, "i32")},
            {**given, "BLOCK_M": 16, "BLOCK_N": 16},
            aligned=("a", "b", "out"),
        )

    return compile_accumulate


KERNELS: tuple[Kernel, ...] = (
    Kernel("int8 GEMM, M = 1", _gemm(1, 4096, "i8"), operands="s8"),
    Kernel("int8 GEMM, M = 64", _gemm(64, 4096, "i8"), operands="s8"),
    Kernel("int8 GEMM, M = 4096", _gemm(4096, 4096, "i8"), operands="s8"),
    Kernel("int8 GEMM, M = 4096, K = 4001", _gemm(4096, 4001, "i8"), operands="s8"),
    Kernel("fp8 E4M3 GEMM, M = 4096", _gemm(4096, 4096, "fp8e4nv"), FP8_TARGETS, "fp8"),
    Kernel("fp8 E5M2 GEMM, M = 4096", _gemm(4096, 4096, "fp8e5"), FP8_TARGETS, "fp8"),
    Kernel("per-token quantize, K = 4096", _quantize_rows("none", 4096)),
    Kernel("LayerNorm + quantize, K = 1024", _quantize_rows("layer_norm", 1024)),
    Kernel("RMSNorm + quantize, K = 4096", _quantize_rows("rms_norm", 4096)),
    Kernel("GELU + quantize, K = 4096", _quantize_rows("gelu", 4096)),
    Kernel("fp16 accumulator, simulated", _accumulate(FloatingPoint(5, 10), None)),
    Kernel("fp8 accumulator, chunks of 32", _accumulate(FloatingPoint(5, 2), 32)),
)
"""What the tests compile and the table lists."""
