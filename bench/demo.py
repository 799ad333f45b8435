"""The main job on a real model and real text: quantize, compile, run, compare with eager.

``make demo`` runs it. It ends with exit code 1 if an encoder Linear did not become int8 or a float
matrix product is left for one in the generated code.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from .. import text, zoo
from ..cli import console
from . import ceilings, machine, quality
from .harness import Timing, compare

CALIBRATION_TEXTS = 64
FIDELITY_TEXTS = 256
SPEED_BATCH, SPEED_TOKENS = 8, 128
ENCODER_LINEARS = 36
"""all-MiniLM-L6-v2: 6 layers of query, key, value, attention output, intermediate, output."""


@dataclass(frozen=True)
class Int8:
    """One way of quantizing, compiled.

    Attributes:
        name: qsim-static or qsim-dynamic.
        run: the compiled model.
        products: library matrix products in the generated code.
        first_call_s: seconds of the first call, compilation included.
    """

    name: str
    run: Any
    products: list[str]
    first_call_s: float


def build(loaded: zoo.Loaded, calibration: tuple[str, ...], activation: str) -> Int8:
    """Quantize with SmoothQuant and compile once for every batch size and length."""
    from torch._inductor.utils import run_and_get_code

    import qinductor

    config = qinductor.SmoothQuantConfig(alpha=0.5, activation=activation)
    with console.progress() as bars:
        batches = [batch for _, batch in zoo.batches(loaded, calibration, batch_size=8)]
        task = bars.add_task(f"calibrating, {activation}", total=len(batches))

        def fed() -> Any:
            for batch in batches:
                yield batch
                bars.advance(task)

        qmodel = qinductor.quantize_model(loaded.model, fed(), config)
        task = bars.add_task(f"compiling, {activation}", total=1)
        fast = torch.compile(qmodel, backend="qsim", dynamic=True)
        start = time.perf_counter()
        with torch.no_grad():
            _, codes = run_and_get_code(fast, **batches[0])
        seconds = time.perf_counter() - start
        bars.advance(task)
    return Int8(f"qsim-{activation}", fast, quality.left_products(codes), seconds)


def check(int8: Int8, expected: int = ENCODER_LINEARS) -> list[str]:
    """Say what is not as it should be: nothing, on a machine that is supported."""
    import qinductor

    counts = qinductor.explain(int8.run).to_dict()["linears"]
    found = []
    if counts["int8"] != expected:
        found.append(f"{int8.name}: {counts['int8']} Linears are int8, not {expected}")
    if len(int8.products) > counts["kept"]:
        found.append(
            f"{int8.name}: {len(int8.products)} library matrix products in the generated code for "
            f"{counts['kept']} Linears kept in float"
        )
    return found


def speeds(loaded: zoo.Loaded, ways: dict[str, Any], texts: tuple[str, ...]) -> dict[str, Timing]:
    """Time every way on the same full rows, interleaved."""
    batch = zoo.packed_batch(loaded, texts, SPEED_BATCH, SPEED_TOKENS)

    def timed(model: Any) -> Any:
        def call() -> Any:
            with torch.no_grad():
                return model(**batch)

        return call

    return compare({name: timed(model) for name, model in ways.items()}, rounds=7)


def tasks(loaded: zoo.Loaded, ways: dict[str, Any]) -> dict[str, dict[str, str]]:
    """STS-B and Banking77 of every way, where the data stands; else nothing."""
    cells: dict[str, dict[str, str]] = {name: {} for name in ways}
    if text.has_dataset("stsb"):
        for name, model in ways.items():
            cells[name]["STS-B Spearman"] = f"{quality.stsb_spearman(model, loaded):.4f}"
    if text.has_dataset("banking77"):
        (train, intents), (test, expected) = text.banking77("train"), text.banking77("test")
        head = quality.Banking77Head(zoo.embed(loaded.model, loaded, train), intents)
        for name, model in ways.items():
            accuracy = head.accuracy(zoo.embed(model, loaded, test), expected)
            cells[name]["Banking77 accuracy"] = f"{100 * accuracy:.2f} %"
    return cells


def main() -> int:
    """Run the demo; returns the exit code."""
    import qinductor

    console.quiet_libraries()
    started = time.perf_counter()
    threads = torch.get_num_threads()
    print(machine.describe(machine.machine_header(ceilings.measure(threads), threads)))
    loaded = zoo.load_model(zoo.MINILM)
    corpus = text.corpus()
    calibration = corpus.first(CALIBRATION_TEXTS).texts
    print(
        f"model: {loaded.name} ({loaded.source}); "
        f"calibration: {len(calibration)} texts of {corpus.name}"
    )

    int8 = [build(loaded, calibration, activation) for activation in ("static", "dynamic")]
    for way in int8:
        report = qinductor.explain(way.run)
        print(f"\n{way.name}: first call {way.first_call_s:.1f} s, compilation included")
        # The same Linears in both: the whole table once.
        print(report if way is int8[0] else report.to_dict()["linears"])
        print(f"library matrix products in the generated code: {', '.join(way.products) or 'none'}")
    problems = [problem for way in int8 for problem in check(way)]

    ways = {"eager fp32": loaded.model, **{way.name: way.run for way in int8}}
    held_out = corpus.texts[CALIBRATION_TEXTS : CALIBRATION_TEXTS + FIDELITY_TEXTS]
    reference = zoo.embed(loaded.model, loaded, held_out)
    near = {
        name: quality.fidelity(reference, zoo.embed(model, loaded, held_out))
        for name, model in ways.items()
    }
    timings = speeds(loaded, ways, held_out)
    cells = tasks(loaded, ways)
    print()
    console.table(
        f"int8 against eager fp32, batch {SPEED_BATCH} × {SPEED_TOKENS} tokens",
        (
            "",
            "ms",
            "spread",
            "× eager",
            "tokens/s",
            "cosine mean",
            "min",
            "rank corr.",
            *cells[next(iter(ways))],
        ),
        (
            (
                name,
                f"{1e3 * timing.median:.1f}",
                f"{timing.spread:.0%}",
                f"{timing.ratio_to(timings['eager fp32']):.2f}",
                f"{SPEED_BATCH * SPEED_TOKENS / timing.median:,.0f}",
                f"{near[name].mean:.5f}",
                f"{near[name].min:.5f}",
                f"{near[name].rank_correlation:.5f}",
                *cells[name].values(),
            )
            for name, timing in timings.items()
        ),
    )
    for problem in problems:
        print(f"NOT AS IT SHOULD BE: {problem}")
    print(f"done in {time.perf_counter() - started:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
