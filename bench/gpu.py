"""How fast is it on a GPU? `python -m qinductor.bench.gpu [--quick] [--json FILE]`.

Products in Tera-operations a second beside torch's own, quantizers in GB/s beside a device copy,
BERT encoders beside bfloat16. Each question's candidates are timed in the same rounds. Needs no
network and nothing beyond torch and Triton; BERT needs transformers, and is left out without it.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..capability import Capability
from .harness import compare

Calls = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    ``value`` is in ``unit``; ``ratio`` says how many times quicker than ``baseline``; None where
    the candidate failed, and ``error`` says how.
    """

    question: str
    candidate: str
    value: float | None
    unit: str
    ratio: float | None
    baseline: str
    error: str = ""


def measure(
    question: str, calls: Calls, amount: float, unit: str, *, wait: Callable[[], object]
) -> Iterator[Row]:
    """Time ``calls``; ``amount`` units of work are done by each, the first one is the baseline.

    A candidate that raises gets a row that says so, and the others are compared all the same.
    """
    baseline = next(iter(calls))
    ready: Calls = {}
    for name, call in calls.items():
        try:
            call()
            wait()
        except Exception as error:
            yield Row(question, name, None, unit, None, baseline, _named(error))
        else:
            # The clock stops when the device is done.
            ready[name] = lambda call=call: (call(), wait())  # type: ignore[misc]
    if not ready:
        return
    timings = compare(ready)
    for name, timing in timings.items():
        first = timings.get(baseline)
        ratio = None if first is None else timing.ratio_to(first)
        yield Row(question, name, amount / timing.median, unit, ratio, baseline)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    """Call ``times`` times in a row, so that launches overlap and the wait does not count."""

    def run() -> None:
        for _ in range(times):
            call()

    return run


REPEATS = 10


def products(m: int, n: int, k: int) -> tuple[Calls, float]:
    """Int8 and fp8 products and torch's, and their operations in 10^12."""
    from ..templates.triton import launch
    from ..templates.triton.tiles import choose_tile

    gpu = Capability.detect().gpu
    assert gpu is not None
    a, b = (torch.randint(-128, 128, s, dtype=torch.int8, device="cuda") for s in ((m, k), (n, k)))
    wide_a, wide_b = a.bfloat16(), b.bfloat16()
    calls: Calls = {
        "bf16 matmul": lambda: wide_a @ wide_b.t(),
        "int8 torch._int_mm": lambda: torch._int_mm(a, b.t()),
        "int8 Triton": lambda: launch.gemm(a, b, choose_tile(m, n, k, gpu)),
    }
    if gpu.reason_against("fp8") is None:
        small_a, small_b = (t.to(torch.float8_e4m3fn) for t in (wide_a, wide_b))
        tile = choose_tile(m, n, k, gpu, "fp8")
        calls["fp8 Triton"] = lambda: launch.gemm(small_a, small_b, tile)
    calls = {name: repeated(call, REPEATS) for name, call in calls.items()}
    return calls, REPEATS * 2 * m * n * k / 1e12


def row_quantizers(rows: int, k: int) -> tuple[Calls, float]:
    """Per-token quantizers and a copy that moves as many bytes, in GB."""
    from ..ops import quantize_per_token
    from ..templates.triton import launch

    x = torch.randn(rows, k, device="cuda").bfloat16()
    # bfloat16 read, uint8 written: a copy of 3/4 of the elements moves as much.
    source = x.flatten()[: x.numel() * 3 // 4]
    target = torch.empty_like(source)
    weight = torch.ones(k, device="cuda")
    compiled = torch.compile(torch.ops.qinductor.quantize_per_token, backend="qsim")
    calls: Calls = {
        "copy": lambda: target.copy_(source),
        "eager": lambda: quantize_per_token(x),
        "compiled": lambda: compiled(x),
        "Triton": lambda: launch.quantize_rows(x),
        "Triton, RMSNorm": lambda: launch.quantize_rows(x, "rms_norm", weight=weight),
    }
    calls = {name: repeated(call, REPEATS) for name, call in calls.items()}
    return calls, REPEATS * 3 * x.numel() / 1e9


def format_quantizers(elements: int) -> tuple[Calls, float]:
    """Simulated formats, nearest and stochastic, compiled; and a copy. In GB."""
    from ..numerics import BlockFloatingPoint, Rounding, quantize

    x = torch.randn(elements, device="cuda")
    target = torch.empty_like(x)
    calls: Calls = {"copy": lambda: target.copy_(x)}
    formats = ("E4M3", "E5M2", "FP16", "BF16", "MXFP8_E4M3", "MXFP4", BlockFloatingPoint(8))
    for fmt in formats:
        for mode in (Rounding.TIES_TO_EVEN, Rounding.STOCHASTIC):
            seed = 1 if mode is Rounding.STOCHASTIC else None
            run = functools.partial(quantize, fmt=fmt, rounding=mode, seed=seed)
            compiled = torch.compile(run, backend="qsim")
            calls[f"{fmt} {mode.name.lower()}"] = functools.partial(compiled, x)
    return {name: repeated(c, REPEATS) for name, c in calls.items()}, REPEATS * 8 * elements / 1e9


def bert(
    layers: int, width: int, batch: int, length: int, device: str = "cuda"
) -> tuple[Calls, float]:
    """An encoder with random weights in bfloat16 and int8, and the number of its tokens."""
    from transformers import BertConfig, BertModel

    from .. import SmoothQuantConfig, convert, lay_out, prepare

    config = BertConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
    )
    tokens = torch.randint(0, config.vocab_size, (batch, length), device=device)
    half = BertModel(config).eval().to(device, torch.bfloat16)
    prepared = prepare(BertModel(config), SmoothQuantConfig(activation="dynamic"))
    with torch.no_grad():
        prepared(tokens[:1].cpu())
    int8 = lay_out(convert(prepared).to(device, torch.bfloat16))
    models = {
        "bf16 eager": half,
        "bf16 compiled": torch.compile(half),
        "int8 qsim": torch.compile(int8, backend="qsim"),
    }

    def call(model: Any) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad():
                return model(tokens).last_hidden_state

        return run

    return {name: call(model) for name, model in models.items()}, batch * length


def questions(quick: bool) -> Iterator[tuple[str, str, Callable[[], tuple[Calls, float]]]]:
    """Title, unit and what to time."""
    for m, n, k in ((4096, 4096, 4096), (16, 4096, 4096), (1, 4096, 4096)):
        yield f"product {m}x{n}x{k}", "Top/s", functools.partial(products, m, n, k)
    yield "per-token quantize 16384x4096", "GB/s", lambda: row_quantizers(16384, 4096)
    yield "quantize 2^26 float32", "GB/s", lambda: format_quantizers(1 << 26)
    yield "BERT-base 32x384", "tokens/s", lambda: bert(12, 768, 32, 384)
    if not quick:
        yield "BERT-large 32x384", "tokens/s", lambda: bert(24, 1024, 32, 384)


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| question | candidate | value | × baseline |", "|---|---|---|---|"]
    for row in rows:
        value = row.error[:60] if row.value is None else f"{row.value:.4g} {row.unit}"
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append(f"| {row.question} | {row.candidate} | {value} | {ratio} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave BERT-large out")
    parser.add_argument("--json", metavar="FILE", help="write rows and machine there")
    options = parser.parse_args(arguments)
    gpu = Capability.detect().gpu
    if gpu is None:
        print("no CUDA device: nothing to measure. See docs/gpu.md for what is known without one.")
        return 1
    rows: list[Row] = []
    for title, unit, make in questions(options.quick):
        torch._dynamo.reset()
        try:
            calls, amount = make()
        except Exception as error:
            rows.append(Row(title, "-", None, unit, None, "-", _named(error)))
        else:
            rows += measure(title, calls, amount, unit, wait=torch.cuda.synchronize)
        print(f"done: {title}", file=sys.stderr, flush=True)
    print(f"{gpu.name} ({gpu.target}), torch {torch.__version__}\n\n{table(rows)}")
    if options.json:
        machine = {"gpu": asdict(gpu), "torch": torch.__version__}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "rows": [asdict(row) for row in rows]}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
