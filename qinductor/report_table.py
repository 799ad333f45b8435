"""How a :class:`qinductor.report.Report` looks in a terminal."""

from __future__ import annotations

import io
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .report import Report


def render(report: Report, width: int = 118) -> str:
    """Return the report as text tables, ``width`` characters wide."""
    from rich.console import Console
    from rich.table import Table

    out = io.StringIO()
    console = Console(file=out, width=width, no_color=True, highlight=False)
    counts = report.counts()
    console.print(
        f"linears: {counts['total']} = {counts['int8']} int8 + {counts['simulated']} simulated + "
        f"{counts['kept']} kept in float"
    )
    if not report.graphs:
        console.print(
            "Nothing is compiled yet: call the compiled model once, then ask again. (A model "
            "compiled with inductor_options() and found in Inductor's cache has no report; "
            'backend "qsim" always has one.)'
        )
    table = Table("linear", "runs as", "kernel, or why not", pad_edge=False)
    for linear in report.linears:
        table.add_row(linear.site, linear.status, linear.detail)
    if report.linears:
        console.print(table)
    tally = Counter((e.rule, e.action, e.detail) for e in report.entries)
    if tally:
        rules = Table("pass", "did", "what", "sites", pad_edge=False)
        for (rule, action, detail), number in tally.items():
            rules.add_row(rule, action, detail, str(number))
        console.print(rules)
    if report.graphs:
        graphs = Table(
            "graph", "calls", "isa", "int8 kernels", "compiled", "ends because", pad_edge=False
        )
        for i, graph in enumerate(report.graphs):
            graphs.add_row(
                str(i),
                "not counted" if graph["calls"] is None else str(graph["calls"]),
                graph["isa"],
                str(graph["int8_kernels"]),
                "read from cache" if graph["from_cache"] else "here",
                graph["graph_break"] or "the model ends",
            )
        console.print(graphs)
    return out.getvalue().rstrip()
