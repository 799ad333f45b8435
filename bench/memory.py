"""What a process takes of the machine's memory while it runs: peak resident size, page faults."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"
"""Written to clear_refs, sets VmHWM to what is resident now (proc(5), since Linux 4.0)."""


@dataclass(frozen=True)
class Memory:
    """Of a process, between two points in time.

    Attributes:
        peak_rss: most bytes that were resident at once, weights and libraries included; None where
            the system cannot tell for a part of a process's life.
        page_faults: minor faults a call, of all threads. A fresh page costs one, and its zeroing.
    """

    peak_rss: int | None
    page_faults: float


def minor_faults() -> int:
    """Minor page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def reset_peak() -> bool:
    """Let :func:`peak_rss` begin anew; False where the system has no such switch."""
    try:
        (_PROCESS / "clear_refs").write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    return True


def peak_rss() -> int | None:
    """Most bytes resident since :func:`reset_peak`, or None where /proc does not say."""
    try:
        lines = (_PROCESS / "status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [line for line in lines if line.startswith("VmHWM:")]
    return int(found[0].split()[1]) * 1024 if found else None


class Meter:
    """Counts from :meth:`start` on."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin anew."""
        self._resets = reset_peak()
        self._faults = minor_faults()

    def read(self, calls: int) -> Memory:
        """What ``calls`` calls since :meth:`start` took."""
        return Memory(
            peak_rss() if self._resets else None,
            (minor_faults() - self._faults) / max(calls, 1),
        )
