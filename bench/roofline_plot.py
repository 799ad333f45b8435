"""The roofline as a chart: ceilings as lines, kernels as points."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from . import machine
from .plot import pyplot

UNITS = {"int8": "#3a9d5d", "bf16": "#4f8fc0", "fp32": "#9e9e9e"}
_DASHES = {"L1": ":", "L2": "-.", "L3": "--", "DRAM": "-"}
_LEFT, _RIGHT = 0.5, 4096.0
"""Ends of the axis of operations a byte: element-wise kernels to the deepest linear layers."""


def plot(result: dict[str, Any], path: Path) -> None:
    """Write a result of :func:`qinductor.bench.roofline.measure` as a PNG.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8.5, 5.5), layout="constrained")
    peaks = {k: v for k, v in (result["machine"]["peak_gop_s"] or {}).items() if v}
    levels = result["bandwidth_gb_s"]
    top = max(peaks.values(), default=0.0)
    for level in levels:
        # A slope ends where it meets the highest roof.
        end = min(_RIGHT, top / level["gb_s"]) if top else _RIGHT
        axes.plot(
            [_LEFT, end], [_LEFT * level["gb_s"], end * level["gb_s"]],
            color="#555555", linewidth=0.9, linestyle=_DASHES.get(level["name"], "-"),
            label=f"{level['name']} {level['gb_s']:.0f} GB/s",
        )  # fmt: skip
    fastest = max((level["gb_s"] for level in levels), default=0.0)
    for unit, peak in peaks.items():
        start = max(_LEFT, peak / fastest) if fastest else _LEFT
        axes.plot(
            [start, _RIGHT], [peak, peak], color=UNITS[unit], linewidth=1.4,
            label=f"{unit} {peak:.0f} G op/s",
        )  # fmt: skip
    shown = [one for one in result["kernels"] if one["gop_s"] and one["intensity"]]
    for one in shown:
        # The area is the share of the model's time.
        axes.scatter(
            one["intensity"], one["gop_s"], s=40 + 900 * one["share_of_model"],
            color=UNITS[one["unit"]], alpha=0.55, edgecolors="black", linewidths=0.6, zorder=3,
        )  # fmt: skip
        axes.annotate(
            f"{one['name']} ({one['share_of_model']:.0%})", (one["intensity"], one["gop_s"]),
            fontsize=7, xytext=(0, -13), textcoords="offset points", ha="center", va="top",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    axes.set_xlim(_LEFT, _RIGHT)
    axes.set_xlabel("operations a byte of least traffic")
    axes.set_ylabel("1e9 operations a second")
    axes.grid(which="major", linewidth=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, loc="lower right")
    title = f"{result['model']}, batch {result['batch']} × {result['seq']}. " + machine.describe(
        result["machine"]
    )
    axes.set_title(textwrap.fill(title, width=95), fontsize=8, loc="left")
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)
