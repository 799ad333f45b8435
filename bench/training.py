"""What does simulating cost? One training step, simulated and not, all in the same rounds.

``python -m qinductor.bench.training`` times a step (forward, loss, backward, SGD) of a small VGG
and of a six-layer transformer: compiled in float32, and simulated by the compiler with the input,
the weight and the gradient of every convolution and linear layer rounded; and what a matmul with a
simulated accumulator costs. It writes results/training.json, and from it the table of
docs/training.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ..simulation import Accumulator, Precision, Rule, SimulationSpec
from ..simulation.accumulate import accumulate
from . import machine
from .harness import MIN_ROUNDS, Timing, compare

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RESULTS = Path(__file__).resolve().parent / "results"
GUIDE = EXAMPLES.parent / "docs" / "training.md"
LAYERS = ("linear", "conv2d")


def _spec(forward: Any, backward: Any) -> SimulationSpec:
    rule = Rule(op=LAYERS, optional=True, input=forward, weight=forward, grad_output=backward)
    return SimulationSpec((rule,), seed=0)


def _stochastic(fmt: str) -> Precision:
    return Precision(fmt, "STOCHASTIC", random_bits=8)  # type: ignore[arg-type]


SPECS: dict[str, Callable[[], SimulationSpec]] = {
    "fp8 nearest": lambda: _spec("E4M3", "E5M2"),
    "fp8 stochastic": lambda: _spec(_stochastic("E4M3"), _stochastic("E5M2")),
    "block8 nearest": lambda: _spec("BlockFloatingPoint(8)", "BlockFloatingPoint(8)"),
    "fixed8 stochastic": lambda: _spec(
        _stochastic("FixedPoint(8, 6)"), _stochastic("FixedPoint(8, 6)")
    ),
}


def _example(name: str) -> ModuleType:
    if not EXAMPLES.is_dir():
        raise SystemExit(f"the benchmark trains the examples' models, and {EXAMPLES} is absent.")
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


def vgg() -> tuple[nn.Module, Tensor, Tensor]:
    """A model, its input and its targets."""
    model: nn.Module = _example("train_vgg").VggSmall()
    return model, torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))


def transformer() -> tuple[nn.Module, Tensor, Tensor]:
    """A model, its input and its targets."""
    model: nn.Module = _example("train_transformer").CharTransformer(65, width=256, layers=6)
    tokens = torch.randint(0, 65, (16, 65))
    return model, tokens[:, :-1], tokens[:, 1:].flatten()


MODELS = {"vgg-small 64×3×32×32": vgg, "transformer 16×64": transformer}


def _step(
    build: Callable[[], tuple[nn.Module, Tensor, Tensor]], spec: SimulationSpec | None
) -> Callable[[], None]:
    torch.manual_seed(0)
    model, x, y = build()
    run: Any = torch.compile(model)
    if spec is not None:
        options: dict[str, Any] = {"simulate": spec}
        run = torch.compile(model, backend="qsim", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(run(x).flatten(0, -2), y).backward()
        optimizer.step()

    return step


def steps(rounds: int, models: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a model and variant; ``overhead`` is over float32 compiled by stock Inductor."""
    rows = []
    for name, build in models.items():
        calls = {"fp32 compiled": _step(build, None)}
        for variant, make in SPECS.items():
            torch._dynamo.reset()
            calls[variant] = _step(build, make())
            calls[variant]()
        torch._dynamo.reset()
        for call in calls.values():
            call()
        rows += _rows(name, compare(calls, rounds=rounds))
    return rows


def products(rounds: int, size: int = 512) -> list[dict[str, Any]]:
    """A (256, size) x (size, size) product, plain and accumulated."""
    from ..numerics import quantize

    a, b = (quantize(torch.randn(n, size), "E5M2") for n in (256, size))
    accumulators = {
        "1-6-9, chunks of 64": Accumulator("DLFLOAT16", chunk=64),  # type: ignore[arg-type]
        "FP16": Accumulator("FP16"),  # type: ignore[arg-type]
        "fixed 24": Accumulator("FixedPoint(24, 12)"),  # type: ignore[arg-type]
        "aligned to 14 bits": Accumulator("FloatingPoint(8, 23)", aligned_bits=14),  # type: ignore[arg-type]
    }
    calls: dict[str, Callable[[], object]] = {"fp32 matmul": lambda: a @ b}
    for name, accumulator in accumulators.items():
        calls[name] = lambda accumulator=accumulator: accumulate(a, b, accumulator)  # type: ignore[misc]
    rows = _rows(f"matmul 256×{size}×{size}", compare(calls, rounds=rounds))
    for row in rows:
        row["gmacs"] = 256 * size * size / row["ms"] / 1e6
    return rows


def _rows(model: str, timings: dict[str, Timing]) -> list[dict[str, Any]]:
    base = next(iter(timings.values()))
    return [
        {
            "model": model,
            "variant": variant,
            "ms": timing.median * 1e3,
            "spread": timing.spread,
            "overhead": timing.median / base.median - 1,
        }
        for variant, timing in timings.items()
    ]


def markdown(result: dict[str, Any]) -> str:
    """The table of docs/training.md."""
    lines = [
        machine.describe(result["machine"]) + ":",
        "",
        "| what | variant | ms | spread | over the first |",
        "|---|---|---:|---:|---:|",
    ]
    lines += [
        f"| {row['model']} | {row['variant']} | {row['ms']:.1f} | {row['spread']:.0%} | "
        f"{row['overhead']:+.0%} |"
        for row in result["rows"]
    ]
    return "\n".join(lines) + "\n"


def filled(text: str, result: dict[str, Any]) -> str:
    """The text with the block ``<!-- table: training -->`` filled in."""
    before, start, rest = text.partition("<!-- table: training -->\n")
    _, end, after = rest.partition("<!-- end -->")
    return before + start + markdown(result) + end + after


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, write the results; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--model", choices=[n.split()[0] for n in MODELS], action="append")
    parser.add_argument("--output", type=Path, default=RESULTS / "training.json")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    models = {n: b for n, b in MODELS.items() if n.split()[0] in (arguments.model or n)}
    rows = [*products(arguments.rounds), *steps(arguments.rounds, models)]
    table = Table("what", "variant", "ms", "spread", "over the first")
    for row in rows:
        table.add_row(
            *(row["model"], row["variant"], f"{row['ms']:.1f}", f"{row['spread']:.0%}"),
            f"{row['overhead']:+.0%}",
        )
    Console().print(table)
    result = {"machine": machine.machine_header(None, arguments.threads), "rows": rows}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.output == RESULTS / "training.json" and GUIDE.is_file():
        GUIDE.write_text(filled(GUIDE.read_text("utf-8"), result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
