"""The kernels as plain functions on tensors, without a compiler in between.

For tests (on CPU tensors in Triton's interpreter, TRITON_INTERPRET=1) and for benches. Every launch
forbids fused multiply-add, as the operators' definitions do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import ConfigError
from .tiles import Tile

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def gemm(a: Tensor, b: Tensor, tile: Tile, n: int | None = None) -> Tensor:
    """Product of a and the transpose of b, one part for each split of K.

    Args:
        a: (M, K) int8 or fp8, rows contiguous.
        b: (N or more, K or more) of the same kind, rows contiguous.
        tile: sizes of a block.
        n: columns of the product; all rows of b if not given.

    Returns:
        (splits, M, N), int32 for int8 and float32 for fp8. int32 wraps around where the sum does.

    Raises:
        ConfigError: other dtypes.
    """
    import triton
    import triton.language as tl

    from .gemm_tile import gemm_kernel

    (m, k), n = a.shape, b.shape[0] if n is None else n
    integers = a.dtype is torch.int8 and b.dtype is torch.int8
    if not integers and not (a.dtype in FP8 and b.dtype in FP8):
        raise ConfigError(
            f"gemm multiplies int8 by int8, or fp8 by fp8 ({', '.join(map(str, FP8))}); got "
            f"{a.dtype} and {b.dtype}. Quantize both operands first."
        )
    out = a.new_empty((tile.splits, m, n), dtype=torch.int32 if integers else torch.float32)
    grid = (triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n), tile.splits)
    gemm_kernel[grid](
        a, b, out, m, n, k, b.shape[0], tile.split_size(k), a.stride(0), b.stride(0),
        ACC=tl.int32 if integers else tl.float32,
        OTHER=0 if integers else 0.0,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP_M=tile.group,
        EVEN_K=k % tile.k == 0,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out
