"""The GEMM as a template of Inductor's, which fuses what follows into its store.

The text of :mod:`.gemm_tile` goes into every kernel, so that a cached kernel needs nothing of this
package. That text is read, not imported: importing it imports Triton.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config, ir
from torch._inductor.select_algorithm import (
    SymbolicGridFn,
    TritonTemplate,
    autotune_select_algorithm,
)
from torch._inductor.virtualized import V

from ...capability import Gpu
from .tiles import Epilogue, Tile, candidates, choose_tile

NAME = "qinductor_gemm"

_KERNEL = r"""
{{def_kernel("A", "B")}}
    M = {{size("A", 0)}}
    N = {{size(None, 2)}}
    K = {{size("A", 1)}}
    if M * N == 0:
        return
    pid_m, pid_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    pid_k = tl.program_id(1)
    rm = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(INDEX_DTYPE)
    rn = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(INDEX_DTYPE)
    k_begin = pid_k * K_SPLIT
    acc = accumulate_tile(
        A, B, rm % M, rn % {{size("B", 0)}}, k_begin, tl.minimum(K, k_begin + K_SPLIT),
        {{stride("A", 0)}}, {{stride("B", 0)}},
        ACC_TYPE, OTHER, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
    )
    idx_m = rm[:, None]
    idx_n = rn[None, :]
    mask = (idx_m < M) & (idx_n < N)
{% if SPLITS == 1 %}
    {{store_output(("idx_m", "idx_n"), "acc", "mask", val_shape=("BLOCK_M", "BLOCK_N"))}}
{% else %}
    {{store_output(("pid_k", "idx_m", "idx_n"), "acc", "mask", val_shape=("BLOCK_M", "BLOCK_N"))}}
{% endif %}
"""


@SymbolicGridFn
def _grid(*sizes_and_meta: Any, cdiv: Any) -> tuple[Any, Any, int]:
    """Blocks of the output of size (M, N) or (splits, M, N)."""
    *_, m, n, meta = sizes_and_meta
    return (cdiv(m, meta["BLOCK_M"]) * cdiv(n, meta["BLOCK_N"]), meta["SPLITS"], 1)


@functools.cache
def _template() -> TritonTemplate:
    # `size` knows the inputs and the output only; the output's last size has no constant index.
    text = _KERNEL.replace("{{size(None, 2)}}", "{{size(None, -1)}}") + _helpers()
    return TritonTemplate(NAME, _grid, text)


@functools.cache
def _helpers() -> str:
    """Source of the functions that the kernel calls."""
    text = Path(__file__).with_name("gemm_tile.py").read_text(encoding="utf-8")
    lines = text.splitlines()
    wanted = ("tile_of", "accumulate_tile")
    parts = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name in wanted:
            first = node.decorator_list[0].lineno - 1
            parts.append("\n".join(lines[first : node.end_lineno]))
    assert len(parts) == len(wanted)
    return "\n\n" + "\n\n\n".join(parts) + "\n"


def gemm(a: Any, b: Any, n: int, gpu: Gpu, operands: str, epilogue: Epilogue) -> Any:
    """Inductor node of the product of a and the transpose of b.

    Args:
        a: realized (M, K), int8 or fp8; M may be symbolic.
        b: realized (at least N, at least K) of the same kind; K contiguous in both.
        n: columns of the product.
        gpu: what it is made for.
        operands: ``s8`` or ``fp8``.
        epilogue: what the lowering makes of the product.

    Returns:
        int32 or float32, (M, N), or (splits, M, N) where K is summed by several blocks.
    """
    m, k = a.get_size()
    k = int(k)
    hint = V.graph.sizevars.optimization_hint(m)
    tuned = config.max_autotune or config.max_autotune_gemm
    problem = (hint, n, k, gpu, operands, epilogue)
    tiles = candidates(*problem) if tuned else [choose_tile(*problem)]
    choices: list[Any] = []
    layout: Any = None
    for tile in tiles:
        dtype = torch.int32 if operands == "s8" else torch.float32
        size = [m, n] if tile.splits == 1 else [tile.splits, m, n]
        layout = ir.FixedLayout(a.get_device(), dtype, size)
        _append(choices, a, b, layout, tile, k, operands)
    if len(choices) == 1:
        return choices[0].output_node()
    result = autotune_select_algorithm(NAME, choices, [a, b], layout)
    # From torch 2.12 on the choice comes along.
    return result[0] if isinstance(result, tuple) else result


def _append(
    choices: list[Any], a: Any, b: Any, layout: Any, tile: Tile, k: int, operands: str
) -> None:
    integers = operands == "s8"
    error = _template().maybe_append_choice(
        choices,
        input_nodes=(a, b),
        layout=layout,
        num_stages=tile.stages,
        num_warps=tile.warps,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        GROUP_M=tile.group,
        SPLITS=tile.splits,
        K_SPLIT=tile.split_size(k),
        EVEN_K=k % tile.k == 0,
        ACC_TYPE="tl.int32" if integers else "tl.float32",
        OTHER="0" if integers else "0.0",
    )
    if error is not None:
        raise error
