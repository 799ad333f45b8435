"""Models that torchao converted, taken over: the same arithmetic in this package's layers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from sq_nets import WIDTH, Mlp, outlier_input
from torch import nn
from torchao.prototype.smoothquant import SmoothQuantConfig as TorchaoSmoothQuant
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8StaticActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)
from torchao.quantization.granularity import PerRow, PerTensor
from torchao.quantization.quant_primitives import MappingType

import qinductor
from qinductor.errors import ConversionError
from qinductor.smoothquant import QuantizedLinear, from_torchao
from qinductor.smoothquant.sites import SITES_ATTRIBUTE, site_notes

DYNAMIC = Int8DynamicActivationInt8WeightConfig(version=2, set_inductor_config=False)


def _static(mapping: MappingType = MappingType.SYMMETRIC) -> Int8StaticActivationInt8WeightConfig:
    return Int8StaticActivationInt8WeightConfig(
        granularity=[PerTensor(), PerRow()], act_mapping_type=mapping, set_inductor_config=False
    )


def _smooth(model: nn.Module, base: object, x: torch.Tensor) -> nn.Module:
    model = copy.deepcopy(model)
    quantize_(model, TorchaoSmoothQuant(base, "prepare"))
    model(x)
    quantize_(model, TorchaoSmoothQuant(base, "convert"))
    return model


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Mlp(nn.GELU()).eval().requires_grad_(False)


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """The same integers; torchao adds the bias to a product it rounds in another order."""
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("lead", [(9,), (2, 5)])
def test_dynamic_has_the_same_codes_and_scales(model: nn.Module, lead: tuple[int, ...]) -> None:
    x = outlier_input(*lead, WIDTH)
    theirs = copy.deepcopy(model)
    quantize_(theirs, DYNAMIC)
    expected = theirs.first(x)
    codes = theirs.first.weight.data.qdata.clone()
    ours = from_torchao(theirs)
    assert ours is theirs and isinstance(ours.first, QuantizedLinear)
    assert torch.equal(ours.first.codes(), codes)
    _close(ours.first(x), expected)


def test_smoothed_dynamic_keeps_torchaos_multiplier(model: nn.Module) -> None:
    x = outlier_input(9, WIDTH)
    theirs = _smooth(model, DYNAMIC, x)
    expected = theirs.first(x)
    ours = from_torchao(theirs)
    assert ours.first.multiplier is not None and ours.first.smoothing().shape == (WIDTH,)
    _close(ours.first(x), expected)
    site = getattr(ours, SITES_ATTRIBUTE)[0]
    assert site["fold"] == "multiply" and site["activation"] == "dynamic s8 per token"


def test_smoothed_static_differs_by_a_code_at_most(model: nn.Module) -> None:
    x = outlier_input(9, WIDTH)
    theirs = _smooth(model, _static(), x)
    weight = theirs.first.weight.data
    codes = torch.round(x * weight.act_pre_scale * (1.0 / weight.act_quant_scale)).clamp(-128, 127)
    expected = theirs.first(x)
    ours = from_torchao(theirs).first
    mine = torch.ops.qinductor.quantize(x, ours.x_inverse_scale, ours.x_zero_point).float() - 128
    assert float((mine - codes).abs().max()) <= 1 and float((mine != codes).float().mean()) < 0.01
    bound = float(ours.x_scale) * 127 * ours.w_scale * float((mine != codes).sum(-1).max())
    assert bool(((ours(x) - expected).abs() <= bound + 1e-5).all())


def test_static_with_a_zero_point(model: nn.Module) -> None:
    x = outlier_input(9, WIDTH) + 3
    theirs = _smooth(model, _static(MappingType.ASYMMETRIC), x)
    weight = theirs.first.weight.data
    zero = int(weight.act_quant_zero_point)
    assert zero != 0
    ours = from_torchao(theirs)
    assert int(ours.first.x_zero_point) == zero + 128
    assert getattr(ours, SITES_ATTRIBUTE)[0]["activation"] == "static u8"
    reference = model.first(x)
    assert float((ours.first(x) - reference).norm() / reference.norm()) < 0.02


def test_what_cannot_be_taken_over_stays_with_its_reason(model: nn.Module) -> None:
    quantize_(model, DYNAMIC, filter_fn=lambda m, name: name == "first")
    ours = from_torchao(model)
    assert isinstance(ours.first, QuantizedLinear) and type(ours.second) is nn.Linear
    assert "is float" in site_notes(ours)["second"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Int8WeightOnlyConfig(version=2, set_inductor_config=False), "only its weight is int8"),
        (
            Int8DynamicActivationInt8WeightConfig(
                version=2, granularity=PerTensor(), set_inductor_config=False
            ),
            "not per token",
        ),
        (None, "is float"),
    ],
)
def test_nothing_to_take_over(model: nn.Module, config: object, reason: str) -> None:
    if config is not None:
        quantize_(model, config)
    with pytest.raises(ConversionError, match=reason):
        from_torchao(model)


def test_is_saved_and_loaded(model: nn.Module, tmp_path: Path) -> None:
    x = outlier_input(9, WIDTH)
    quantize_(model, DYNAMIC)
    ours = from_torchao(model)
    qinductor.save(ours, tmp_path / "net")
    loaded = qinductor.load(tmp_path / "net", model=Mlp(nn.GELU()))
    assert torch.equal(loaded(x), ours(x)) and loaded.first.divisor == 127.5


def test_prepare_says_what_is_in_the_way(model: nn.Module) -> None:
    quantize_(model, DYNAMIC)
    with pytest.raises(qinductor.ModelError, match="Int8Tensor, not a plain tensor"):
        qinductor.prepare(model)
