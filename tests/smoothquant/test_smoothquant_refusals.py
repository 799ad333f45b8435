"""Bad input: each ends with one message that names the thing and the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import tiny_bert
from sq_nets import WIDTH, Mlp, TwoLayers, token_batch
from torch import Tensor, nn

import qinductor
from qinductor.errors import CalibrationError, ConfigError, ConversionError, ModelError
from qinductor.smoothquant import SmoothQuantConfig, convert, prepare


def test_a_model_without_linears() -> None:
    with pytest.raises(ModelError, match=r"Conv1d has no nn.Linear"):
        prepare(nn.Conv1d(3, 3, 3))


def test_a_pattern_that_matches_nothing() -> None:
    with pytest.raises(ConfigError, match=r"'frist' matches no module.*'first'"):
        prepare(Mlp(nn.ReLU()), SmoothQuantConfig(skip=("frist",)))


def test_convert_before_calibrate_and_twice_and_unprepared() -> None:
    with pytest.raises(ConversionError, match=r"was not prepared.*qinductor.prepare"):
        convert(Mlp(nn.ReLU()))
    prepared = prepare(Mlp(nn.ReLU()))
    with pytest.raises(ConversionError, match=r"convert\(\) before calibration"):
        convert(prepared)
    prepared(torch.randn(4, WIDTH))
    qmodel = convert(prepared)
    for again in (prepared, qmodel):
        with pytest.raises(ConversionError, match="int8 already"):
            convert(again)
    with pytest.raises(ConversionError, match="int8 already"):
        prepare(qmodel)
    with pytest.raises(ConversionError, match="prepared already"):
        prepare(prepare(Mlp(nn.ReLU())))


@pytest.mark.parametrize("batches", [[], iter(())])
def test_an_empty_calibration_set(batches: Any) -> None:
    with pytest.raises(CalibrationError, match="calibration set is empty"):
        qinductor.quantize_model(Mlp(nn.ReLU()), batches)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_names_the_module(bad: float) -> None:
    model, x = Mlp(nn.ReLU()), torch.randn(4, WIDTH)
    x[2, 3] = bad
    with pytest.raises(CalibrationError, match="input of first holds NaN or infinity"):
        qinductor.quantize_model(model, [x])
    with torch.no_grad():
        model.first.bias[0] = bad
    with pytest.raises(CalibrationError, match="input of second holds NaN or infinity"):
        qinductor.quantize_model(model, [torch.randn(4, WIDTH)])


def test_a_failed_batch_leaves_no_mode_behind() -> None:
    from torch.overrides import _get_current_function_mode_stack

    prepared = prepare(Mlp(nn.ReLU()))
    with pytest.raises(RuntimeError, match="shape"):
        prepared(torch.randn(4, WIDTH + 1))
    assert not _get_current_function_mode_stack()
    prepared(torch.randn(4, WIDTH))
    assert convert(prepared).first.in_features == WIDTH


def test_unknown_keys_are_named_with_the_valid_ones() -> None:
    with pytest.raises(CalibrationError, match=r"'labels'.*TwoLayers.*input_ids, attention_mask"):
        qinductor.quantize_model(TwoLayers(), [{**token_batch([3], 4, 0, 1), "labels": 1}])


def test_unknown_keys_of_a_huggingface_model() -> None:
    """Its forward swallows any keyword; what it really takes is in the annotation."""
    ids = torch.randint(0, 100, (2, 5))
    with pytest.raises(
        CalibrationError, match=r"'sentence'.*BertModel.*attention_mask.*output_hid"
    ):
        qinductor.quantize_model(tiny_bert(), [{"input_ids": ids, "sentence": ids}])
    qinductor.quantize_model(tiny_bert(), [{"input_ids": ids, "output_hidden_states": True}])


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 1, 4, 4), r"shape \(2, 1, 4, 4\).*\(2, 4\)"),
        (torch.ones(2, 5), r"shape \(2, 5\).*\(2, 4\)"),
        (torch.zeros(2, 4), "calls every token padding"),
    ],
)
def test_a_mask_that_does_not_fit(mask: Tensor, message: str) -> None:
    ids = torch.randint(0, 50, (2, 4))
    with pytest.raises(CalibrationError, match=message):
        qinductor.quantize_model(TwoLayers(), [{"input_ids": ids, "attention_mask": mask}])


def test_training_mode_is_refused() -> None:
    prepared = prepare(Mlp(nn.ReLU()).train())
    assert not prepared.training
    prepared.train()
    with pytest.raises(CalibrationError, match=r"prepared.eval\(\)"):
        prepared(torch.randn(4, WIDTH))
