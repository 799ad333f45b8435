"""The harness: rounds in turn, medians and spreads, peaks, tables, charts."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

import numpy
import pytest

from qinductor.bench import ceilings, machine, models, quality, tables
from qinductor.bench.harness import MIN_ROUNDS, Timing, calls_per_sample, compare, interleave
from qinductor.bench.memory import Memory
from qinductor.bench.variants import Variant
from qinductor.bench.worker import Built
from qinductor.capability import Capability, Isa, cpp_compiler


def test_timing_is_median_min_and_quartile_distance() -> None:
    timing = Timing((4.0, 1.0, 2.0, 3.0, 5.0))
    assert (timing.median, timing.min) == (3.0, 1.0)
    assert timing.spread == pytest.approx((4.0 - 2.0) / 3.0)
    assert Timing((1.5,)).ratio_to(timing) == 2.0
    assert Timing((1.5,)).spread == 0.0


@pytest.mark.parametrize("seconds", [(), (1.0, 0.0), (-1.0,)])
def test_a_timing_without_positive_samples_is_refused(seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="at least one positive sample"):
        Timing(seconds)


def test_rounds_alternate_and_every_candidate_has_one_sample_a_round() -> None:
    order: list[str] = []

    def sampler(name: str) -> Any:
        def take() -> float:
            order.append(name)
            return float(len(order))

        return take

    rounds: list[int] = []
    timings = interleave(
        {name: sampler(name) for name in "abc"}, rounds=5, after_round=lambda: rounds.append(1)
    )
    assert "".join(order) == "abccbaabccbaabc"
    assert timings["a"].seconds == (1.0, 6.0, 7.0, 12.0, 13.0)
    assert len(rounds) == 5


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match=f"at least {MIN_ROUNDS}"):
        interleave({}, rounds=MIN_ROUNDS - 1)


def test_quick_calls_are_repeated_within_a_sample() -> None:
    calls: list[int] = []
    count = calls_per_sample(lambda: calls.append(1))
    assert count > 100
    assert len(calls) >= 3  # warmed up before the count was taken


def test_compare_tells_a_slow_call_from_a_quick_one() -> None:
    numbers = list(range(2000))
    timings = compare({"slow": lambda: sorted(numbers * 20), "quick": lambda: sorted(numbers)})
    assert timings["quick"].ratio_to(timings["slow"]) > 2


@pytest.mark.skipif(cpp_compiler() is None, reason="no C++ compiler")
@pytest.mark.isa("avx2")
def test_peaks_are_ordered_as_the_instructions_are() -> None:
    peaks = ceilings.measure(1)
    assert peaks is not None
    # A core with AVX2 does at least one 8-wide FMA a cycle at over 1 GHz, and none reaches 32.
    assert 16 < peaks.fp32 < 16 * 32 * 6
    assert peaks.int8 > peaks.fp32
    assert (peaks.bf16 > 0) == (
        Capability.detect().avx512_bf16 and Isa.AVX512_VNNI in Capability.detect().isas
    )


def test_peaks_of_a_machine_without_loops_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = dataclasses.replace(Capability.detect(), isas=(Isa.PORTABLE,))
    monkeypatch.setattr(Capability, "detect", classmethod(lambda _cls, _cap=None: bare))
    assert ceilings.measure.__wrapped__(1) is None


def test_machine_header_names_what_a_figure_depends_on() -> None:
    header = machine.machine_header(None, 2)
    assert header["threads"] == 2
    assert header["peak_gop_s"] is None
    assert header["packages"]["torch"].startswith("2.")
    assert header["cpu"] in machine.describe(header)


def result_of(medians: dict[Variant, float]) -> dict[str, Any]:
    """A result as measure() gives it, from made-up timings of a made-up shape."""
    shape = (8, 128)
    request = models.Request("a-model", (shape,), threads=2)
    timings = {v.value: Timing((s, s, s)) for v, s in medians.items()}
    pooled = numpy.array([[1.0, 0.0], [0.6, 0.8]])
    built = {v: Built(1.0, 1, pooled, 2_000_000_000) for v in medians}
    peaks = ceilings.Ceilings(100.0, 200.0, 400.0)
    memory = Memory(peak_rss=512_000_000, page_faults=1234.5)
    rows = [models._row(request, shape, v, timings, built, memory, peaks) for v in medians]
    return {"machine": machine.machine_header(peaks, 2), "rows": rows, "errors": []}


MEDIANS = {Variant.EAGER: 0.1, Variant.INDUCTOR_FP32: 0.08, Variant.QSIM_STATIC: 0.02}


def test_rows_hold_ratios_to_eager_and_to_the_best_fp32() -> None:
    eager, compiled, static = result_of(MEDIANS)["rows"]
    assert static["speedup_vs_eager"] == pytest.approx(5.0)
    assert static["speedup_vs_best_fp32"] == pytest.approx(4.0)
    assert (eager["speedup_vs_eager"], compiled["speedup_vs_best_fp32"]) == (1.0, 1.0)
    assert static["tokens_per_s"] == pytest.approx(8 * 128 / 0.02)
    assert static["share_of_int8_peak"] == pytest.approx(100.0 / 400.0)
    assert static["cosine_vs_eager"] == pytest.approx(1.0)


def test_the_cosine_is_that_of_the_worst_row() -> None:
    a = numpy.array([[1.0, 0.0], [1.0, 0.0]])
    assert models.cosine(a, numpy.array([[2.0, 0.0], [0.6, 0.8]])) == pytest.approx(0.6)


def test_the_table_shows_every_row() -> None:
    columns, cells = tables.text_table(result_of(MEDIANS))
    assert [row[2] for row in cells] == [variant.value for variant in MEDIANS]
    assert {len(row) for row in cells} == {len(columns)}
    assert cells[2][5] == "5.00"
    assert columns[-2:] == ("MB", "faults")
    assert cells[2][-2:] == ("512", "1,234")


def test_results_without_memory_have_no_columns_for_it() -> None:
    result = result_of(MEDIANS)
    for row in result["rows"]:
        del row["peak_rss_bytes"], row["page_faults_per_call"]
    columns, cells = tables.text_table(result)
    assert columns[-1] == "cosine"
    assert {len(row) for row in cells} == {len(columns)}


def test_a_chart_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from qinductor.bench.plot import plot

    path = tmp_path / "chart.png"
    plot(result_of(MEDIANS), path)
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:])
    assert width > 500
    assert height > 300


@pytest.mark.parametrize("shapes", [(), ((0, 128),), ((8, -1),)])
def test_shapes_are_checked(shapes: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        models.Request("m", shapes, threads=1)


def test_eager_always_runs() -> None:
    request = models.Request("m", ((1, 8),), threads=1, variants=(Variant.QSIM_STATIC,))
    assert request.variants == (Variant.EAGER, Variant.QSIM_STATIC)


def test_left_products_counts_calls_not_comments() -> None:
    code = """
# Topologically Sorted Source Nodes: [x], Original ATen: [aten.addmm]
extern_kernels.addmm(arg0, arg1, alpha=1, beta=1, out=buf1)
extern_kernels.mm(arg0, arg1, out=buf2)
buf3 = torch.ops.mkldnn._linear_pointwise.default(arg0)
extern_kernels.bmm(a, b, out=c)
cpp_fused_qlinear_0(buf1, buf2)
"""
    assert quality.left_products([code]) == ["addmm", "mm", "_linear_pointwise"]


@pytest.mark.isa("avx2")
def test_a_broken_compiler_costs_the_peaks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    assert ceilings.measure.__wrapped__(1) is None
