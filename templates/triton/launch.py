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


PRODUCERS = ("none", "layer_norm", "rms_norm", "gelu")
MAX_ROW = 1 << 16
"""Longest row: one program holds it in registers."""


def quantize_rows(
    x: Tensor,
    producer: str = "none",
    *,
    multiplier: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    divisor: float = 127.0,
    min_scale: float = torch.finfo(torch.float32).tiny,
    store: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize each row of producer(x) as :func:`qinductor.ops.quantize_per_token` does.

    Args:
        x: (..., K) float32, bfloat16 or float16, contiguous.
        producer: one of :data:`PRODUCERS`; a norm is over the last dimension.
        multiplier: float32 (K,), applied to the produced row before it is quantized.
        weight: float (K,), of a norm.
        bias: float (K,), of a LayerNorm.
        eps: added to the variance or mean square.
        divisor: code of the row's largest magnitude.
        min_scale: lower bound of a scale.
        store: return the produced tensor too.

    Returns:
        uint8 codes (..., K), float32 scales (..., 1), and the produced tensor in x's dtype or None.

    Raises:
        ConfigError: another producer, a norm without weight, or a row beyond :data:`MAX_ROW`.
    """
    import triton

    from ...activations import GELU_COEFFICIENTS
    from .row_quantize import quantize_rows_kernel

    k = x.shape[-1]
    if producer not in PRODUCERS:
        raise ConfigError(f"unknown producer {producer!r}. Valid: {', '.join(PRODUCERS)}.")
    if producer.endswith("norm") and weight is None:
        raise ConfigError(f"producer {producer!r} needs the norm's weight: give weight=.")
    if k > MAX_ROW:
        raise ConfigError(
            f"a row of {k} does not fit one program; at most {MAX_ROW}. Compile "
            "torch.ops.qinductor.quantize_per_token instead, which has no limit."
        )
    codes = torch.empty_like(x, dtype=torch.uint8)
    scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    produced = torch.empty_like(x) if store and producer != "none" else None
    table = torch.tensor(GELU_COEFFICIENTS, device=x.device) if producer == "gelu" else None
    block = triton.next_power_of_2(k)
    quantize_rows_kernel[(scales.numel(),)](
        x, multiplier, weight, bias, table, codes, scales, produced, k,
        EPS=eps, DIVISOR=divisor, MIN_SCALE=min_scale, PRODUCER=producer,
        HAS_MULTIPLIER=multiplier is not None, HAS_BIAS=bias is not None,
        STORE=produced is not None, BLOCK=block,
        num_warps=min(16, max(1, block // 512)), enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scales, produced
