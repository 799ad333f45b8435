"""Streaming statistics of a Linear's input, over real tokens only.

A :class:`LinearObserver` keeps the smallest and largest value of every channel. The range of the
*smoothed* input follows from them exactly, whatever the smoothing factors turn out to be:
``min_k(min x_k / s_k)`` and ``max_k(max x_k / s_k)``. So one pass suffices, batches may differ in
length, and memory does not grow with calibration. Percentile and MSE ranges need a distribution:
for them a fixed number of rows is kept, chosen by a hash of the row's running number, so that the
choice depends neither on a random state nor on how the tokens were divided into batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLE_ROWS = 512
"""Rows that a :class:`RowSample` keeps: 512 x 768 float32 are 1.5 MB a Linear."""


def real_rows(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the rows of ``x`` (..., K) that belong to real tokens, as (rows, K).

    Args:
        x: a Linear's input. Its leading dimensions may be those of ``mask``, those and more, the
            mask's flattened, or a 2-D mask's transposed; otherwise its rows are not tokens (one
            pooled vector a sequence, say) and all of them count.
        mask: bool, True for a real token, or None: all tokens are real.
    """
    rows = x.reshape(-1, x.shape[-1])
    if mask is None or bool(mask.all()):
        return rows
    lead = x.shape[:-1]
    if lead[: mask.ndim] == mask.shape:
        return x[mask].reshape(-1, x.shape[-1])
    if len(lead) == 1 and lead[0] == mask.numel():
        return rows[mask.reshape(-1)]
    if mask.ndim == 2 and lead == mask.shape[::-1]:
        return x[mask.t()]
    return rows


class RowSample:
    """Uniform sample of at most :data:`SAMPLE_ROWS` rows (Vitter's algorithm R, hashed)."""

    def __init__(self, rows: int = SAMPLE_ROWS) -> None:
        self.capacity = rows
        self.seen = 0
        self.data: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """Offer float rows (n, K)."""
        rows = rows.float()
        if self.data is None:
            self.data = rows.new_empty((0, rows.shape[1]))
        fill = min(self.capacity - self.data.shape[0], rows.shape[0])
        if fill > 0:
            self.data = torch.cat([self.data, rows[:fill]])
        if fill < rows.shape[0]:
            number = torch.arange(self.seen + fill, self.seen + rows.shape[0], dtype=torch.int64)
            slot = _hash(number) % (number + 1)
            for i in torch.nonzero(slot < self.capacity).flatten().tolist():
                self.data[int(slot[i])] = rows[fill + i]
        self.seen += rows.shape[0]


def _hash(x: Tensor) -> Tensor:
    """Mix int64 into 0 … 2**62 - 1 (SplitMix64's finalizer with arithmetic shifts masked)."""
    x = x * -7046029254386353131
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -7723592293110705685
    return (x ^ ((x >> 31) & (2**33 - 1))) & (2**62 - 1)


class LinearObserver:
    """Per-channel range, and on request a row sample, of one Linear's input.

    Attributes:
        low, high: float32 (K,), or None before the first real token.
        rows: number of real rows seen.
    """

    def __init__(self, sample: bool) -> None:
        self.low: Tensor | None = None
        self.high: Tensor | None = None
        self.rows = 0
        self.sample = RowSample() if sample else None

    @torch.no_grad()
    def observe(self, rows: Tensor) -> bool:
        """Take in float rows (n, K); False, and nothing taken, if one of them is not finite."""
        if rows.shape[0] == 0:
            return True
        low, high = (t.float() for t in torch.aminmax(rows, dim=0))
        # A NaN or an infinity anywhere in a column shows in its minimum or maximum.
        if not bool(torch.isfinite(low).all() and torch.isfinite(high).all()):
            return False
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)
        self.rows += rows.shape[0]
        if self.sample is not None:
            self.sample.add(rows.detach())
        return True
