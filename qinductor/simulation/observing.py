"""observe(): what rounding does to each tensor of a simulated model while it trains."""

from __future__ import annotations

import io
import json
import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from qinductor.errors import ConfigError
from qinductor.numerics.op import outside

from .eager import Handle, handle_of
from .handle import Simulation, Site
from .spec import Precision

LOWEST, HIGHEST = -160, 160
"""Exponents that the histogram tells apart; those beyond are counted at its ends."""


@dataclass
class SiteStats:
    """Sums over all tensors that were observed at one site."""

    site: Site
    precision: Precision
    tensors: int = 0
    elements: int = 0
    saturated: int = 0
    """Finite elements beyond the format's range (of their block)."""
    underflowed: int = 0
    """Elements that were not zero and became zero."""
    nan: int = 0
    inf: int = 0
    signal: float = 0.0
    noise: float = 0.0
    exponents: Tensor = field(
        default_factory=lambda: torch.zeros(HIGHEST - LOWEST + 1, dtype=torch.int64)
    )
    """(321,): elements by ⌊log2 |x|⌋, from −160 on."""

    def add(self, x: Tensor, q: Tensor) -> None:
        """Count one tensor and what it was rounded to."""
        finite = torch.isfinite(x)
        both = finite & torch.isfinite(q)
        wide = x.double()
        self.tensors += 1
        self.elements += x.numel()
        self.saturated += int((outside(x, self.precision.format.key) & finite).sum())
        self.underflowed += int(((x != 0) & (q == 0)).sum())
        self.nan += int(torch.isnan(x).sum())
        self.inf += int(torch.isinf(x).sum())
        self.signal += float(torch.where(both, wide, 0).square().sum())
        self.noise += float(torch.where(both, wide - q.double(), 0).square().sum())
        exponent = torch.frexp(wide[finite & (x != 0)]).exponent.long() - 1
        bins = exponent.clamp(LOWEST, HIGHEST) - LOWEST
        self.exponents += torch.bincount(bins.cpu(), minlength=HIGHEST - LOWEST + 1)

    @property
    def sqnr_db(self) -> float:
        """10·log10(Σx² / Σ(x−q)²) over finite elements; inf where nothing changed."""
        if not self.noise:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf

    @property
    def trouble(self) -> tuple[float, float, float]:
        """What the table is sorted by: NaN and infinity, then lost elements, then SQNR."""
        n = max(self.elements, 1)
        return (self.nan + self.inf) / n, (self.saturated + self.underflowed) / n, -self.sqnr_db

    def to_dict(self) -> dict[str, Any]:
        """Plain data; the histogram by exponent, empty bins left out."""
        counts = {i + LOWEST: int(n) for i, n in enumerate(self.exponents.tolist()) if n}
        return {
            "site": str(self.site),
            "format": str(self.precision),
            "tensors": self.tensors,
            "elements": self.elements,
            "saturated": self.saturated,
            "underflowed": self.underflowed,
            "nan": self.nan,
            "inf": self.inf,
            "sqnr_db": self.sqnr_db if math.isfinite(self.sqnr_db) else None,
            "exponents": {str(e): n for e, n in counts.items()},
        }


class Observation:
    """What :func:`observe` collects; prints as a table, worst sites first.

    Attributes:
        stats: by site.
        first_nan, first_zero_gradient: (site, step) of the first tensor with a NaN, and of the
            first gradient that was, or became, all zeros; None where there was none.
    """

    def __init__(self, simulation: Simulation, every: int) -> None:
        self.simulation, self.every = simulation, every
        self.stats: dict[Site, SiteStats] = {}
        self.first_nan: tuple[Site, int] | None = None
        self.first_zero_gradient: tuple[Site, int] | None = None

    def __enter__(self) -> Self:
        """Start."""
        self.simulation.watchers.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        """Stop: nothing is looked at any more, and nothing costs time."""
        self.simulation.watchers.remove(self)

    @torch.no_grad()
    def __call__(self, site: Site, precision: Precision, x: Tensor, q: Tensor) -> None:
        """Take in one rounding."""
        step = int(self.simulation.step) - 1
        if step % self.every or not x.numel():
            return
        stats = self.stats.setdefault(site, SiteStats(site, precision))
        before = stats.nan
        stats.add(x, q)
        if self.first_nan is None and (stats.nan > before or bool(torch.isnan(q).any())):
            self.first_nan = site, step
            self._warn(f"the first NaN is in {site}, at step {step}")
        if self.first_zero_gradient is None and site.role.startswith("grad") and not q.any():
            self.first_zero_gradient = site, step
            became = "was all zeros" if not x.any() else f"became all zeros in {precision}"
            self._warn(f"the gradient at {site} {became}, at step {step}")

    @staticmethod
    def _warn(message: str) -> None:
        warnings.warn(f"qinductor.observe: {message}.", RuntimeWarning, stacklevel=3)

    @property
    def worst_first(self) -> list[SiteStats]:
        """Every site's sums, the most troubled first."""
        return sorted(self.stats.values(), key=lambda s: s.trouble, reverse=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as :meth:`save` writes it."""
        first = (self.first_nan, self.first_zero_gradient)
        named = [None if f is None else {"site": str(f[0]), "step": f[1]} for f in first]
        return {
            "every": self.every,
            "first_nan": named[0],
            "first_zero_gradient": named[1],
            "sites": [s.to_dict() for s in self.worst_first],
        }

    def save(self, path: str | Path) -> None:
        """Write JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def plot(self, path: str | Path, *, most: int = 12) -> None:
        """Write a PNG: the histogram of exponents of the ``most`` worst sites. Needs matplotlib."""
        from matplotlib.figure import Figure

        shown = self.worst_first[:most]
        figure = Figure(figsize=(10, 1.6 * max(len(shown), 1)), layout="constrained")
        axes: Any = figure.subplots(max(len(shown), 1), 1, squeeze=False)
        for axis, stats in zip(axes[:, 0], shown, strict=False):
            bins = torch.nonzero(stats.exponents).flatten()
            axis.bar((bins + LOWEST).tolist(), stats.exponents[bins].tolist(), width=0.9)
            fmt = stats.precision.format
            for name in ("step", "max"):
                edge = getattr(fmt, name, None)
                if edge:
                    axis.axvline(math.log2(edge), color="tab:red", linewidth=1)
            axis.set_title(f"{stats.site}  ({stats.precision})", fontsize=8)
            axis.tick_params(labelsize=7)
        figure.supxlabel("exponent of the elements; red: the format's smallest and largest")
        figure.savefig(path)

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table("site", "format", "SQNR dB", "saturated", "to zero", "NaN", pad_edge=False)
        for s in self.worst_first:
            n = max(s.elements, 1)
            table.add_row(
                *(str(s.site), str(s.precision), f"{s.sqnr_db:.1f}"),
                *(f"{s.saturated / n:.2%}", f"{s.underflowed / n:.2%}", str(s.nan)),
            )
        out = io.StringIO()
        console = Console(file=out, width=118, no_color=True, highlight=False)
        console.print(table)
        for what, found in (
            ("first NaN", self.first_nan),
            ("first all-zero gradient", self.first_zero_gradient),
        ):
            if found is not None:
                console.print(f"{what}: {found[0]}, step {found[1]}", markup=False)
        return out.getvalue().rstrip()


def observe(model: nn.Module | Simulation, *, every: int = 1) -> Observation:
    """Collect what rounding does at every site of a simulated model.

    ``with qinductor.simulate(model, spec), qinductor.observe(model) as seen: ...; print(seen)``

    Args:
        model: the model that :func:`qinductor.simulate` was given, or the handle it returned. A
            compiled model runs the same numbers without telling them: observe it in eager mode.
        every: look at one forward pass in this many, and at its backward pass.

    Raises:
        ConfigError: the model is not simulated; ``every`` is not positive.
    """
    if not isinstance(every, int) or every < 1:
        raise ConfigError(f"every={every!r} must be a positive integer.")
    simulation = model if isinstance(model, Simulation) else handle_of(model)
    if not isinstance(simulation, Handle):
        raise ConfigError(
            "observe() needs a model that is simulated in eager mode: call "
            "qinductor.simulate(model, spec) first, and give it that model or the handle. What a "
            "compiled model rounds is the same."
        )
    return Observation(simulation, every)
