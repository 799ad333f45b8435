"""Looking at formats: describe() one, compare() several on a tensor, plot them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qinductor.errors import ConfigError

from .format_base import ElementFormat, Format
from .formats import FloatingPoint
from .named import parse_format
from .quantize import QuantizeStats, quantize
from .rounding import Rounding


def describe(fmt: Format | str) -> str:
    """A table of a format's properties, one a line."""
    fmt = parse_format(fmt) if isinstance(fmt, str) else fmt
    rows: list[tuple[str, object]] = [("format", fmt), ("definition", repr(fmt))]
    rows.append(("bits per value", f"{fmt.bits_per_value:g}"))
    if isinstance(fmt, ElementFormat):
        rows += [("max", f"{fmt.max:g}"), ("min", f"{fmt.min:g}")]
        rows.append(("smallest positive", f"{fmt.step:g}"))
        rows.append(("-0", "yes" if fmt.negative_zero else "no"))
        if fmt.listed:
            rows.append(("finite values", len(fmt.values)))
    if isinstance(fmt, FloatingPoint):
        rows += [("smallest normal", f"{fmt.min_normal:g}"), ("special codes", fmt.nans.value)]
        rows.append(("overflow", "saturates" if fmt.saturate else "to infinity or NaN"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}s}  {value}" for name, value in rows)


@dataclass(frozen=True)
class Comparison:
    """What several formats do to one tensor."""

    x: Tensor
    formats: tuple[Format, ...]
    stats: tuple[QuantizeStats, ...]

    def __str__(self) -> str:
        head = f"{'format':28s} {'bits':>6s} {'SQNR dB':>9s} {'saturated':>10s} {'to zero':>9s}"
        lines = [
            f"{fmt!s:28.28s} {fmt.bits_per_value:6.2f} {s.sqnr_db:9.2f} "
            f"{s.saturated / max(s.elements, 1):10.3%} {s.underflowed / max(s.elements, 1):9.3%}"
            for fmt, s in zip(self.formats, self.stats, strict=True)
        ]
        return "\n".join([head, *lines])

    def plot(self, path: str | Path) -> None:
        """Write a chart: each format's values over the tensor's histogram, and its errors.

        Needs matplotlib.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 2.5 * len(self.formats)), layout="constrained")
        axes: Any = figure.subplots(len(self.formats), 2, squeeze=False)
        finite = self.x[torch.isfinite(self.x)].flatten().to(torch.float64)
        for (left, right), fmt in zip(axes, self.formats, strict=True):
            q = quantize(self.x, fmt).to(torch.float64)
            shown = q[torch.isfinite(q)].unique()
            left.hist(finite.numpy(), bins=100, color="tab:blue", alpha=0.5)
            left.plot(shown.numpy(), torch.zeros_like(shown).numpy(), "|", color="black")
            left.set_title(f"{fmt!s}: values in use over the tensor")
            error = (q - self.x.to(torch.float64)).flatten()
            right.hist(error[torch.isfinite(error)].numpy(), bins=100, color="tab:red")
            right.set_title(f"{fmt!s}: error")
        figure.savefig(path)


def compare(
    x: Tensor,
    formats: Sequence[Format | str],
    rounding: Rounding = Rounding.TIES_TO_EVEN,
    *,
    seed: int | None = None,
) -> Comparison:
    """Quantize x to each format; ``str()`` of the result is a table, ``.plot(path)`` a chart.

    Raises:
        ConfigError: no format is given.
    """
    if not formats:
        raise ConfigError("compare() needs at least one format, for example ['E4M3', 'E5M2'].")
    parsed = tuple(parse_format(f) if isinstance(f, str) else f for f in formats)
    x = x.detach()
    stats = tuple(quantize(x, f, rounding, seed=seed, stats=True)[1] for f in parsed)
    return Comparison(x, parsed, stats)
