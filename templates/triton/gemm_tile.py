# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The main loop of the GEMM, and the kernel that is it alone.

Both operands have K as their last, contiguous dimension, as the int8 and fp8 instructions of every
GPU want it. The functions stand once: :mod:`.gemm` writes their text into Inductor's template, and
tests and benches call :func:`gemm_kernel`.

This module imports Triton: import it where a kernel is wanted, not before.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of(pid, grid_m, grid_n, GROUP_M: tl.constexpr):
    """Row and column of tile ``pid``: GROUP_M rows of tiles share the columns in the L2 cache."""
    width = GROUP_M * grid_n
    first = (pid // width) * GROUP_M
    rows = tl.minimum(grid_m - first, GROUP_M)
    within = pid % width
    return first + within % rows, within // rows


@triton.jit
def accumulate_tile(
    a,
    b,
    rm,
    rn,
    k_begin,
    k_end,
    stride_a,
    stride_b,
    ACC: tl.constexpr,
    OTHER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Sum of a[rm, k] * b[rn, k] over k_begin <= k < k_end, (BLOCK_M, BLOCK_N) of type ACC.

    a, b: pointers to rows of int8 or fp8, ``stride_a`` and ``stride_b`` elements apart. rm, rn:
    rows that exist. EVEN_K: the range is a multiple of BLOCK_K. OTHER: zero of the operands' kind.
    """
    rk = k_begin + tl.arange(0, BLOCK_K)
    a_tile = a + rm[:, None] * stride_a + rk[None, :]
    b_tile = b + rn[None, :] * stride_b + rk[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    for k in range(k_begin, k_end, BLOCK_K):
        if EVEN_K:
            x = tl.load(a_tile)
            w = tl.load(b_tile)
        else:
            inside = tl.arange(0, BLOCK_K) < k_end - k
            x = tl.load(a_tile, mask=inside[None, :], other=OTHER)
            w = tl.load(b_tile, mask=inside[:, None], other=OTHER)
        if ACC == tl.int32:  # noqa: SIM300 - ACC is no constant to Python
            acc = tl.dot(x, w, acc, out_dtype=tl.int32)
        else:
            # Hopper adds fp8 products in fewer bits than float32 has; each step's sum is promoted.
            acc = tl.dot(x, w, acc, max_num_imprecise_acc=BLOCK_K)
        a_tile += BLOCK_K
        b_tile += BLOCK_K
    return acc


@triton.jit
def gemm_kernel(
    a,
    b,
    out,
    M,
    N,
    K,
    N_ROWS,
    K_SPLIT,
    stride_a,
    stride_b,
    ACC: tl.constexpr,
    OTHER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """out[split, M, N] = the part of a (M, K) times b (N_ROWS, K) transposed that a split sums.

    Grid: (tiles, splits). Split s sums s * K_SPLIT <= k < (s + 1) * K_SPLIT. N_ROWS >= N: rows that
    b has. No row or column of the output needs to be a multiple of anything: rows beyond M repeat
    others and are not stored.
    """
    pid_m, pid_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    rm = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    rn = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k_begin = tl.program_id(1) * K_SPLIT
    acc = accumulate_tile(
        a, b, rm % M, rn % N_ROWS, k_begin, tl.minimum(K, k_begin + K_SPLIT), stride_a, stride_b,
        ACC, OTHER, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
    )  # fmt: skip
    index = tl.program_id(1).to(tl.int64) * M * N + rm[:, None] * N + rn[None, :]
    tl.store(out + index, acc, mask=(rm[:, None] < M) & (rn[None, :] < N))
