"""A chart of a result: speed against eager, by shape and variant."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import machine

COLOURS = {
    "eager": "#9e9e9e",
    "inductor-fp32": "#6b7a8f",
    "inductor-bf16": "#4f8fc0",
    "torchao-static": "#e3a857",
    "torchao-dynamic": "#c9812f",
    "qsim-static": "#3a9d5d",
    "qsim-dynamic": "#1f6f3f",
    "openvino-int8": "#8e5ea2",
    "onnxruntime-dynamic": "#c45850",
    "onnxruntime-static": "#e08b84",
    "torchao-static-max-autotune": "#a8621a",
    "ctranslate2-int8": "#5f9ea0",
}


def pyplot() -> Any:
    """Matplotlib's pyplot, drawing into files.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed. Install it with: "
            "pip install 'qinductor[bench]'."
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as found

    return found


def plot(result: dict[str, Any], path: Path) -> None:
    """Write grouped bars of ``speedup_vs_eager``, one group a model and shape, as a PNG.

    Raises:
        ConfigError: see :func:`pyplot`.
    """
    plt = pyplot()
    rows = result["rows"]
    groups = list(dict.fromkeys((row["model"], row["batch"], row["seq"]) for row in rows))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    value = {(row["model"], row["batch"], row["seq"], row["variant"]): row for row in rows}
    figure, axes = plt.subplots(
        figsize=(max(6.0, 2.6 * len(groups) + 2), 4.5), layout="constrained"
    )
    width = 0.85 / len(variants)
    for index, variant in enumerate(variants):
        shown = [
            (g, value[(*key, variant)]) for g, key in enumerate(groups) if (*key, variant) in value
        ]
        bars = axes.bar(
            [g + (index - (len(variants) - 1) / 2) * width for g, _ in shown],
            [row["speedup_vs_eager"] for _, row in shown],
            width * 0.92,
            label=variant,
            color=COLOURS.get(variant),
        )
        axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=1)
    axes.set_xticks(
        range(len(groups)), [f"{model}\nbatch {batch} × {seq}" for model, batch, seq in groups]
    )
    axes.set_ylabel("times as fast as eager fp32 (medians)")
    axes.axhline(1.0, color="black", linewidth=0.6)
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, ncols=2, frameon=False, loc="upper left")
    caption = textwrap.fill(
        machine.describe(result["machine"]), width=int(11 * figure.get_figwidth())
    )
    axes.set_title(caption, fontsize=8, loc="left")
    # Room for the legend above the tallest bar.
    axes.set_ylim(top=axes.get_ylim()[1] * 1.25)
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)
