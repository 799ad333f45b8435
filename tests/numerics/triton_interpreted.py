"""Run by test_number_triton.py with TRITON_INTERPRET=1: all functions against the tensor form."""

from __future__ import annotations

import grid_oracle as go
import torch
import triton_kernels as tk

from qinductor.numerics import Rounding
from qinductor.numerics.execute import random_input
from qinductor.numerics.formats import FloatingPoint
from qinductor.numerics.random_bits import Draw
from qinductor.numerics.reference import reference_quantize
from qinductor.numerics.triton_twin import triton_quantizer

ROWS = 64


def inputs(fmt, dtype, columns):
    """Random patterns with all specials, values about the range, boundaries of the format."""
    n = ROWS * columns
    x = torch.cat([go.random_patterns(n // 4, 3).to(dtype), torch.randn(n, dtype=torch.float64)])
    if isinstance(fmt, FloatingPoint):
        x[n // 4 : n // 2] = go.near_range(fmt, n - n // 4, 1)[: n // 2 - n // 4]
        edge = go.boundaries(fmt, torch.float32)
        x[n // 2 : n // 2 + n // 4] = edge[:: max(1, len(edge) // (n // 4))][: n // 4].repeat(n)[
            : n // 4
        ]
    x = x[:n].to(dtype).reshape(ROWS, columns)
    return x * 2.0 ** torch.randint(-3, 3, (ROWS, 1)).to(dtype)


def run(x, fmt, mode, bits, offset):
    columns, out = x.shape[1], torch.empty_like(x)
    q = triton_quantizer(fmt, x.dtype, mode)
    if mode is Rounding.STOCHASTIC:
        tk.apply_random[(1,)](x, out, tk.SEED, tk.STEP, tk.SITE, offset, q, ROWS, columns, bits)
    else:
        tk.apply[(1,)](x, out, q, ROWS, columns)
    return out


def main():
    torch.manual_seed(0)
    count = 0
    for name, fmt in tk.FORMATS.items():
        qtorch = name.startswith("qtorch")
        for dtype in tk.DTYPES[: 1 if qtorch else None]:
            columns = tk.block_of(fmt)
            modes = tk.modes_of(fmt)
            if dtype != torch.float32:
                modes = [m for m in modes if m.name in ("TIES_TO_EVEN", "TO_ODD", "STOCHASTIC")]
            x = inputs(fmt, dtype, columns)
            for mode in modes:
                bits, offset = (32, 9, 3)[count % 3], (0, 2**35 + 5)[count % 2]
                got = run(x, fmt, mode, bits, offset)
                draw = Draw(torch.tensor(tk.SEED), torch.tensor(tk.STEP), tk.SITE, bits, offset)
                u = random_input(x, draw) if mode is Rounding.STOCHASTIC else None
                want = reference_quantize(x, fmt, mode, u, bits)
                wrong = go.same(got.flatten(), want.double().flatten().numpy())
                shown = [t.flatten()[wrong[:4]] for t in (x, got, want)]
                assert not len(wrong), (name, dtype, mode, *shown)
                count += 1
    print("equal:", count)


if __name__ == "__main__":
    main()
