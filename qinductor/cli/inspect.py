"""``qinductor inspect``: what became int8, by which kernel, what did not, and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import console

if TYPE_CHECKING:
    from torch import nn

    from ..zoo import Batch

SAMPLE_TEXTS = 8


def module_rows(model: nn.Module) -> list[dict[str, Any]]:
    """What convert() decided about each Linear of ``model``: see smoothquant.sites.Site."""
    from ..smoothquant.sites import SITES_ATTRIBUTE

    return list(getattr(model, SITES_ATTRIBUTE, ()))


def linears_table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print one line a Linear, and how many of them are int8."""
    console.table(
        title,
        ("Linear", "in", "out", "runs as", "smoothing", "reason"),
        (
            (
                row["name"],
                row["in_features"],
                row["out_features"],
                row["activation"] if row["int8"] else "float",
                f"{row['fold']}{': ' + row['folded_into'] if row['folded_into'] else ''}"
                if row["int8"]
                else "",
                row["reason"] or row["why"] or "",
            )
            for row in rows
        ),
    )
    int8 = sum(row["int8"] for row in rows)
    typer.echo(f"{int8} of {len(rows)} Linears are int8, {len(rows) - int8} kept in float")


def _sample(folder: Path, model: nn.Module) -> Batch:
    """A batch to compile with: real text where a tokenizer was saved, else random ids."""
    import torch

    from .. import text, zoo
    from .quantize import TOKENIZER

    if (folder / TOKENIZER).is_dir():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(folder / TOKENIZER), local_files_only=True)
        loaded = zoo.Loaded(str(folder), model, tokenizer, "saved model")
        return zoo.encode(loaded, text.corpus().first(SAMPLE_TEXTS).texts)
    vocabulary = int(getattr(getattr(model, "config", None), "vocab_size", 100))
    ids = torch.randint(0, vocabulary, (2, 16), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@console.command
def inspect_command(
    target: Annotated[
        str,
        typer.Argument(
            help="A folder written by quantize, or a model to try quantizing in memory."
        ),
    ],
    run: Annotated[
        bool, typer.Option("--compile", help="Compile with qsim and report what each graph runs.")
    ] = False,
    activation: Annotated[
        str, typer.Option(help="static or dynamic, when a float model is tried.")
    ] = "static",
    isa: Annotated[
        str | None, typer.Option(help="Cap the instruction set: portable, avx2, avx512_vnni.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show each Linear of an int8 model: how it runs, or why it stayed float."""
    import torch

    import qinductor

    from .. import text, zoo
    from ..capability import Capability, Isa
    from ..smoothquant.layout import MANIFEST

    if isa is not None:
        Capability.detect(Isa.parse(isa))
    if run:
        console.require_compiler()
    folder = Path(target)
    # A float model's folder has a config.json too; the manifest tells the two apart.
    if (folder / MANIFEST).exists():
        model = qinductor.load(str(folder))
        sample = _sample(folder, model)
        title = f"saved model {target}"
    else:
        config = qinductor.SmoothQuantConfig(activation=activation)
        loaded = zoo.load_model(target)
        if loaded.tokenizer is None:
            sample = zoo.random_batch(loaded, SAMPLE_TEXTS, 64)
        else:
            sample = zoo.encode(loaded, text.corpus().first(SAMPLE_TEXTS).texts)
        model = qinductor.quantize_model(loaded.model, [sample], config)
        title = f"{target} ({loaded.source}), quantized in memory, {activation}"
    rows = module_rows(model)
    report = None
    if run:
        with console.progress(not as_json) as bars:
            task = bars.add_task("compiling", total=1)
            fast = torch.compile(model, backend="qsim", options={} if isa is None else {"isa": isa})
            with torch.no_grad():
                fast(**sample)
            bars.advance(task)
        report = qinductor.explain(fast)
    if as_json:
        console.print_json(
            {"target": target, "linears": rows, "report": report and report.to_dict()}
        )
        return
    linears_table(title, rows)
    if report is not None:
        typer.echo(str(report))
