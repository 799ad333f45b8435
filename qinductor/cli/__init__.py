"""The command line: ``qinductor quantize | bench | roofline | inspect | formats | doctor``.

Each command lives in a module of its own and imports torch only when it runs, so ``--help`` is
immediate.
"""

from __future__ import annotations

import typer

from .bench import bench
from .doctor import doctor
from .formats import formats
from .inspect import inspect_command
from .quantize import quantize
from .roofline import roofline

app = typer.Typer(
    name="qinductor",
    help="Quantize a HuggingFace encoder to int8, compile it, measure it, look into it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(quantize)
app.command()(bench)
app.command()(roofline)
app.command("inspect")(inspect_command)
app.command()(formats)
app.command()(doctor)


def main() -> None:
    """Entry point of the console script."""
    app()
