"""A result of :mod:`qinductor.bench.models` as columns and cells."""

from __future__ import annotations

from typing import Any

MISSING = "missing"
"""Stands in the column of times for a peer that is not installed."""

_COLUMNS = (
    "model", "batch", "variant", "ms", "spread", "× eager", "× fp32",
    "tokens/s", "of peak", "cosine",
)  # fmt: skip
_MEMORY_COLUMNS = ("MB", "faults")


def _memory_cells(row: dict[str, Any]) -> tuple[str, str]:
    peak, faults = row.get("peak_rss_bytes"), row.get("page_faults_per_call")
    return (
        "?" if peak is None else f"{peak / 1e6:,.0f}",
        "?" if faults is None else f"{faults:,.0f}",
    )


def text_table(result: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and cells of a result, for a terminal or a README.

    ``MB`` is the peak of resident memory and ``faults`` the page faults a call; both stand there if
    a row has them, since results of earlier versions do not. Missing peers come last.
    """
    has_memory = any("page_faults_per_call" in row for row in result["rows"])
    columns = _COLUMNS + (_MEMORY_COLUMNS if has_memory else ())
    cells: list[tuple[str, ...]] = []
    for row in result["rows"]:
        share = row["share_of_int8_peak"]
        cells.append(
            (
                row["model"],
                f"{row['batch']}×{row['seq']}",
                row["variant"],
                f"{row['median_s'] * 1e3:.1f}",
                f"{row['spread']:.0%}",
                f"{row['speedup_vs_eager']:.2f}",
                f"{row['speedup_vs_best_fp32']:.2f}",
                f"{row['tokens_per_s']:,.0f}",
                "?" if share is None else f"{share:.0%}",
                f"{row['cosine_vs_eager']:.5f}",
                *(_memory_cells(row) if has_memory else ()),
            )
        )
    for absent in result.get("missing", ()):
        known = (absent["model"], "", absent["variant"], MISSING)
        cells.append(known + ("",) * (len(columns) - len(known)))
    return columns, cells
