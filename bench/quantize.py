"""How fast is a quantizer, next to a plain copy and to qtorch 0.3.0? `python -m bench.quantize`.

Figures are GB/s of reading and writing, with out= given; what counts is the ratio to the copy of
the same run. 4 MB stays in the caches, 128 MB does not. qtorch is compared where it is installed
(its extension builds at import).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch

from bench.harness import compare
from qinductor.numerics import BlockFloatingPoint, Rounding, quantize

NEAREST, STOCHASTIC = Rounding.TIES_TO_EVEN, Rounding.STOCHASTIC
MEBI = 1 << 20


def candidates(x: torch.Tensor, out: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Every quantizer of the comparison, and the copy."""

    def run(fmt: Any, mode: Rounding, **more: Any) -> Callable[[], object]:
        return lambda: quantize(x, fmt, mode, out=out, **more)

    return {
        "copy": lambda: out.copy_(x),
        "E4M3 nearest": run("E4M3", NEAREST),
        "E4M3 stochastic, 32 bits": run("E4M3", STOCHASTIC, seed=1),
        "E4M3 stochastic, 8 bits": run("E4M3", STOCHASTIC, seed=1, random_bits=8),
        "BFP8, one block": run(BlockFloatingPoint(8), NEAREST),
        "MXFP8_E4M3 nearest": run("MXFP8_E4M3", NEAREST),
        "MXFP4 nearest": run("MXFP4", NEAREST),
    }


def qtorch_candidates(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The float_quantize of qtorch, where it can be imported."""
    try:
        from qtorch.quant import float_quantize
    except Exception as error:  # its build may fail in any way
        print(f"qtorch is not compared: {error!r}")
        return {}
    return {
        f"qtorch {mode}": lambda mode=mode: float_quantize(x, 4, 3, mode)  # type: ignore[misc]
        for mode in ("nearest", "stochastic")
    }


def fusion(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """A quantizer between two pointwise neighbours: one kernel, and the neighbours apart."""
    fused = torch.compile(lambda t: (quantize(t * 2.5, "E4M3") + 1).relu(), fullgraph=True)
    first = torch.compile(lambda t: t * 2.5, fullgraph=True)
    last = torch.compile(lambda t: (t + 1).relu(), fullgraph=True)
    return {
        "fused: mul, quantize, add, relu": lambda: fused(x),
        "two kernels: mul; add, relu": lambda: last(first(x)),
    }


def measure(shape: tuple[int, int], dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    """Rows of one comparison."""
    x = torch.randn(shape).to(dtype)
    out = torch.empty_like(x)
    calls = candidates(x, out)
    if dtype == torch.float32:
        calls |= qtorch_candidates(x)
        calls |= fusion(x)
    moved = 2 * x.numel() * x.itemsize
    timings = compare(calls, rounds=rounds)
    return [
        {
            "candidate": name,
            "dtype": str(dtype)[6:],
            "MiB": x.numel() * x.itemsize / MEBI,
            "GB/s": round(moved / t.median / 1e9, 2),
            "best GB/s": round(moved / t.min / 1e9, 2),
            "spread": round(t.spread, 3),
            "of copy": round(t.ratio_to(timings["copy"]), 3),
        }
        for name, t in timings.items()
    ]


def main() -> None:
    """Print the tables, and write them as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--large", action="store_true", help="128 MB too")
    parser.add_argument("--json", help="file to write the rows to")
    args = parser.parse_args()
    rows = []
    cases = [((4 * MEBI // d.itemsize // 1024, 1024), d) for d in
             (torch.float32, torch.float64, torch.bfloat16, torch.float16)]  # fmt: skip
    if args.large:
        cases.append(((32 * 1024, 1024), torch.float32))
    for shape, dtype in cases:
        part = measure(shape, dtype, args.rounds)
        rows += part
        print(f"\n{dtype}, {part[0]['MiB']:.0f} MiB, {torch.get_num_threads()} threads")
        for row in part:
            print(f"{row['candidate']:34s} {row['GB/s']:8.2f} GB/s  best {row['best GB/s']:8.2f}  "
                  f"{row['of copy']:6.3f} of the copy  ± {row['spread']:.0%}")  # fmt: skip
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
