"""The training benchmark: rows, overheads, the result file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qinductor.bench import training
from qinductor.bench.harness import Timing


def test_overhead_is_over_the_first_variant() -> None:
    rows = training._rows("net", {"fp32": Timing((0.1,) * 5), "fp8": Timing((0.12,) * 5)})
    assert [row["overhead"] for row in rows] == [0, pytest.approx(0.2)]
    assert rows[1]["ms"] == pytest.approx(120) and rows[1]["spread"] == 0


def test_products_and_the_result_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    products = training.products
    monkeypatch.setattr(training, "products", lambda rounds: products(rounds, size=16))
    monkeypatch.setattr(training, "steps", lambda rounds, models: [])
    assert training.main(["--threads", "1", "--output", str(tmp_path / "t.json")]) == 0
    data = json.loads((tmp_path / "t.json").read_text("utf-8"))
    assert data["rows"][0]["variant"] == "fp32 matmul"
    assert len(data["rows"]) == 5 and data["machine"]["threads"] == 1
    assert all(row["gmacs"] > 0 for row in data["rows"])


def test_every_variant_rounds_both_kinds_of_layers() -> None:
    for make in training.SPECS.values():
        spec = make()
        for op in ("linear", "conv2d"):
            assert {r.value for r in spec.resolve("x", (), op)[0]} == {
                "input", "weight", "grad_output",
            }  # fmt: skip


def test_the_models_come_from_the_examples() -> None:
    for build in training.MODELS.values():
        model, x, y = build()
        assert model(x[:2]).flatten(0, -2).shape[0] * len(x) == 2 * len(y)


def test_the_guides_table_is_what_the_result_file_says() -> None:
    result = json.loads((training.RESULTS / "training.json").read_text("utf-8"))
    guide = training.GUIDE.read_text("utf-8")
    assert training.filled(guide, result) == guide and "fp8 stochastic" in guide
