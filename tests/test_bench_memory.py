"""The memory counters: they see fresh pages, and forget what was before."""

from __future__ import annotations

import mmap

import pytest

from qinductor.bench.memory import Meter, peak_rss, reset_peak

PAGES = 8192


def touched() -> mmap.mmap:
    """Fresh memory of PAGES pages, each written once."""
    block = mmap.mmap(-1, PAGES * mmap.PAGESIZE)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        block.madvise(mmap.MADV_NOHUGEPAGE)
    for page in range(PAGES):
        block[page * mmap.PAGESIZE] = 1
    return block


def test_page_faults_are_counted_a_call() -> None:
    meter = Meter()
    touched().close()
    touched().close()
    found = meter.read(2).page_faults
    # What else the process does meanwhile takes few pages.
    assert PAGES <= found < 1.5 * PAGES
    meter.start()
    assert meter.read(1).page_faults < PAGES / 10


@pytest.mark.skipif(not reset_peak(), reason="/proc/self/clear_refs cannot be written here")
def test_the_peak_is_that_since_the_start() -> None:
    meter = Meter()
    touched().close()
    peak = meter.read(1).peak_rss
    meter.start()
    later = meter.read(1).peak_rss
    assert peak is not None
    assert later is not None
    assert peak - later > 0.9 * PAGES * mmap.PAGESIZE
    assert peak_rss() == later


def test_a_system_without_the_switch_gives_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qinductor.bench.memory.reset_peak", lambda: False)
    assert Meter().read(1).peak_rss is None
