"""``qinductor formats``: every named number format, or one of them in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import console

if TYPE_CHECKING:
    from ..numerics import FloatingPoint, Format


def row(name: str, fmt: Format) -> dict[str, Any]:
    """One format's facts; those it does not have are None."""
    from ..numerics.format_base import ElementFormat
    from ..numerics.formats import FloatingPoint
    from ..numerics.scaled import MX

    of = fmt.element if isinstance(fmt, MX) else fmt
    element = of if isinstance(of, ElementFormat) else None
    floating = of if isinstance(of, FloatingPoint) else None
    return {
        "name": name,
        "bits": fmt.bits,
        "bits_per_value": fmt.bits_per_value,
        "max": element.max if element else None,
        "min_normal": floating.min_normal if floating else None,
        "smallest": element.step if element else None,
        "overflow": _overflow(floating) if floating else None,
        "definition": repr(fmt),
    }


def _overflow(fmt: FloatingPoint) -> str:
    if fmt.saturate:
        return "saturates"
    return "to infinity" if fmt.infinities else "to NaN"


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@console.command
def formats(
    name: Annotated[
        str | None,
        typer.Argument(help="A name, or an expression such as 'FloatingPoint(4, 3)': describe it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """List the named number formats that tensors can be quantized to, or describe one.

    MX rows show their elements; scaled formats have no range of their own.
    """
    from ..numerics import NAMED, describe, parse_format

    if name is not None:
        fmt = parse_format(name)
        if as_json:
            console.print_json(row(str(fmt), fmt))
        else:
            typer.echo(describe(fmt))
        return
    rows = [row(each, fmt) for each, fmt in NAMED.items()]
    if as_json:
        console.print_json({"formats": rows})
        return
    columns = ("name", "bits_per_value", "max", "min_normal", "smallest", "overflow", "definition")
    console.table(
        f"{len(rows)} named formats",
        (column.replace("_", " ") for column in columns),
        ([_cell(r[column]) for column in columns] for r in rows),
    )
