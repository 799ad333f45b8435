"""The one way that things are timed here: warm-up, interleaved rounds, median and spread.

Absolute times move with a machine's neighbours. What is compared is therefore measured in the same
rounds, one candidate after the other, and only ratios within one run count.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MIN_ROUNDS = 5
SAMPLE_SECONDS = 0.02
"""A sample calls its candidate often enough to last this long; the clock then does not matter."""


@dataclass(frozen=True)
class Timing:
    """Seconds a call, one value a round."""

    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.seconds or min(self.seconds) <= 0:
            raise ValueError(f"a timing needs at least one positive sample, got {self.seconds}.")

    @property
    def median(self) -> float:
        """The middle sample, in seconds."""
        return statistics.median(self.seconds)

    @property
    def min(self) -> float:
        """The quickest sample, in seconds."""
        return min(self.seconds)

    @property
    def spread(self) -> float:
        """Distance of the quartiles, as a fraction of the median; 0 for a single sample."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median

    def ratio_to(self, other: Timing) -> float:
        """How many times quicker than ``other`` this is, by medians."""
        return other.median / self.median


def sample(call: Callable[[], object], calls: int) -> float:
    """Return seconds a call over ``calls`` calls, after one that is not timed.

    The first call brings code and data back into the caches after another candidate's turn.
    """
    call()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def calls_per_sample(call: Callable[[], object], *, warm_up: int = 2) -> int:
    """Warm ``call`` up and return how many calls last :data:`SAMPLE_SECONDS`."""
    for _ in range(warm_up):
        call()
    return max(1, round(SAMPLE_SECONDS / max(sample(call, 1), 1e-9)))


def interleave(
    samplers: Mapping[str, Callable[[], float]],
    *,
    rounds: int = MIN_ROUNDS,
    after_round: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Take one sample of every candidate in each round; every other round in reverse order.

    Args:
        samplers: by name, a function that takes one sample and returns seconds a call.
        rounds: how many samples each gets, at least :data:`MIN_ROUNDS`.
        after_round: called after each round, for a progress bar.

    Raises:
        ValueError: too few rounds.
    """
    if rounds < MIN_ROUNDS:
        raise ValueError(f"{rounds} rounds are too few to tell a spread: at least {MIN_ROUNDS}.")
    seconds: dict[str, list[float]] = {name: [] for name in samplers}
    names = list(samplers)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            seconds[name].append(samplers[name]())
        after_round()
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def compare(
    calls: Mapping[str, Callable[[], object]], *, rounds: int = MIN_ROUNDS
) -> dict[str, Timing]:
    """Time functions of this process against each other: warm-up, then :func:`interleave`."""
    counts = {name: calls_per_sample(call) for name, call in calls.items()}
    return interleave(
        {name: functools.partial(sample, call, counts[name]) for name, call in calls.items()},
        rounds=rounds,
    )
