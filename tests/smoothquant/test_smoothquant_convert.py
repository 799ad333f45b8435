"""prepare, calibrate, convert: what becomes int8, what does not and why, and what is refused."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from sq_nets import (
    WIDTH,
    Attention,
    Mlp,
    SharedInput,
    TwoLayers,
    outlier_input,
    relative_error,
    token_batch,
)
from torch import Tensor, nn

import qinductor
from qinductor.errors import ConversionError, ModelError
from qinductor.smoothquant import QuantizedLinear, SmoothQuantConfig, convert, prepare
from qinductor.smoothquant.calibration import CALIBRATION_ATTRIBUTE
from qinductor.smoothquant.sites import SITES_ATTRIBUTE, site_notes

BOTH = [SmoothQuantConfig(), SmoothQuantConfig(activation="dynamic")]
ROUNDING = 0.05
"""A net of two random int8 layers: each of four roundings to 8 bits adds at most about 1 %."""


def _sites(model: nn.Module) -> dict[str, dict[str, Any]]:
    return {site["name"]: site for site in getattr(model, SITES_ATTRIBUTE)}


def _reason(model: nn.Module, name: str) -> str:
    return site_notes(model)[name]


# ---------------------------------------------------------------- the steps


def test_prepare_changes_nothing_but_the_observers() -> None:
    model = SharedInput()
    before = copy.deepcopy(model.state_dict())
    prepared = prepare(model)
    assert type(prepared) is SharedInput and prepared is not model
    assert inspect.signature(prepared.forward) == inspect.signature(model.forward)
    assert prepared.state_dict().keys() == before.keys()
    assert all(type(m) is nn.Linear for m in (prepared.a, prepared.b))
    x = outlier_input(4, WIDTH)
    assert torch.equal(prepared(x), model(x))
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert all(torch.equal(model.state_dict()[name], t) for name, t in before.items())


@pytest.mark.parametrize("config", BOTH)
def test_convert_leaves_an_int8_model_for_inference(config: SmoothQuantConfig) -> None:
    model, x = SharedInput(), outlier_input(2, 9, WIDTH)
    prepared = prepare(model, config)
    prepared(x)
    qmodel = convert(prepared)
    assert qmodel is prepared and type(qmodel) is SharedInput and not qmodel.training
    assert isinstance(qmodel.a, QuantizedLinear) and isinstance(qmodel.b, QuantizedLinear)
    assert not hasattr(qmodel, CALIBRATION_ATTRIBUTE)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in qmodel.modules())
    assert not any(p.requires_grad for p in qmodel.parameters())
    assert relative_error(qmodel(x), model(x)) < ROUNDING
    # The group shares its scales: the very same tensors.
    assert qmodel.a.x_zero_point is qmodel.b.x_zero_point
    assert qmodel.a.x_scale is qmodel.b.x_scale and qmodel.a.multiplier is qmodel.b.multiplier
    assert qmodel.a.x_inverse_scale is qmodel.b.x_inverse_scale


def test_float_weights_are_released() -> None:
    import gc
    import weakref

    prepared = prepare(SharedInput())
    prepared(outlier_input(4, WIDTH))
    weight = weakref.ref(prepared.a.weight)
    qmodel = convert(prepared)
    gc.collect()
    assert weight() is None
    held = sum(t.numel() * t.element_size() for t in qmodel.buffers())
    assert held < 0.5 * sum(p.numel() * p.element_size() for p in SharedInput().parameters())


@pytest.mark.parametrize("alpha", [None, 0.0, 0.3, 1.0])
@pytest.mark.parametrize("activation", ["static", "dynamic"])
def test_every_alpha(alpha: float | None, activation: str) -> None:
    model, x = Mlp(nn.GELU()), torch.randn(64, WIDTH)
    qmodel = qinductor.quantize_model(model, [x], SmoothQuantConfig(alpha, activation))
    assert relative_error(qmodel(x), model(x)) < ROUNDING


@pytest.mark.parametrize("activation_range", ["minmax", "percentile", "mse"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_every_static_range(activation_range: str, symmetric: bool) -> None:
    model, x = Mlp(nn.GELU()), torch.randn(700, WIDTH)
    config = SmoothQuantConfig(
        activation_range=activation_range, symmetric=symmetric, percentile=99.9
    )
    qmodel = qinductor.quantize_model(model, [x], config)
    assert relative_error(qmodel(x), model(x)) < ROUNDING
    assert int(qmodel.first.x_zero_point) == 128 or not symmetric
    full = qinductor.quantize_model(model, [x], SmoothQuantConfig(symmetric=symmetric))
    same = torch.equal(qmodel.first.x_scale, full.first.x_scale)
    assert same if activation_range == "minmax" else qmodel.first.x_scale < full.first.x_scale


def test_the_smoothed_range_is_exact_from_one_pass() -> None:
    """Scale and zero point are those of x / s over all batches; s is known only at the end."""
    model = Mlp(nn.GELU())
    batches = [outlier_input(n, WIDTH, seed=n) for n in (3, 17, 8)]
    qmodel = qinductor.quantize_model(model, batches)
    smoothed = torch.cat(batches) / qmodel.first.smoothing()
    step = (smoothed.max() - smoothed.min()) / 255
    torch.testing.assert_close(qmodel.first.x_scale, step, rtol=1e-6, atol=0)
    assert int(qmodel.first.x_zero_point) == round(float(-smoothed.min() / step))


# ---------------------------------------------------------------- real text: masks and lengths


@pytest.mark.parametrize("config", BOTH)
def test_what_padding_holds_changes_no_bit(config: SmoothQuantConfig) -> None:
    torch.manual_seed(0)
    model = TwoLayers()
    made = []
    for fill in (0, 41):
        batches = [token_batch([3, 7], 9, fill, 1), token_batch([5], 6, fill, 2)]
        made.append(qinductor.quantize_model(model, batches, config))
    a, b = (m.state_dict() for m in made)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_padding_moves_no_statistic_and_would_without_a_mask() -> None:
    torch.manual_seed(0)
    model = TwoLayers()
    with torch.no_grad():
        model.embed.weight[41] *= 100
    tight, wide = token_batch([5, 5], 5, 41, 3), token_batch([5, 5], 12, 41, 3)
    first = [
        qinductor.quantize_model(model, [batch]).layers[0].query
        for batch in (tight, wide, {"input_ids": wide["input_ids"]})
    ]
    # The first layer's input is an embedding, so the same bits whatever the padding.
    assert torch.equal(first[0].x_inverse_scale, first[1].x_inverse_scale)
    assert torch.equal(first[0].packed, first[1].packed)
    assert not torch.equal(first[0].x_inverse_scale, first[2].x_inverse_scale)


def test_the_mask_is_found_by_position_and_inside_a_mapping() -> None:
    class TakesFeatures(TwoLayers):
        def forward(self, features: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(features["input_ids"], features["attention_mask"])

    torch.manual_seed(0)
    model, other = TwoLayers(), TakesFeatures()
    other.load_state_dict(model.state_dict())
    batch = token_batch([5, 2], 12, 41, 3)
    scales = [
        m.layers[0].query.x_inverse_scale
        for m in (
            qinductor.quantize_model(model, [batch]),
            qinductor.quantize_model(model, [(batch["input_ids"], batch["attention_mask"])]),
            qinductor.quantize_model(other, [(batch,)]),
        )
    ]
    assert torch.equal(scales[0], scales[1]) and torch.equal(scales[0], scales[2])


@pytest.mark.parametrize("config", BOTH)
def test_results_do_not_depend_on_the_batch(config: SmoothQuantConfig) -> None:
    torch.manual_seed(0)
    model = TwoLayers()
    qmodel = qinductor.quantize_model(model, [token_batch([9, 4], 9, 0, 1)], config)
    pair = token_batch([6, 9], 20, 7, 5)
    alone = {name: t[:1, :6] for name, t in pair.items()}
    y = qmodel(**pair)[0, :6]
    # int8 layers are exact; attention in float32 sums another number of zeros.
    torch.testing.assert_close(y, qmodel(**alone)[0, :6], rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- what is kept, and why


def test_kept_by_pattern_size_dtype_and_class() -> None:
    class Special(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "good": nn.Linear(WIDTH, WIDTH),
            "skipped": nn.Linear(WIDTH, WIDTH),
            "narrow": nn.Linear(WIDTH, 3),
            "special": Special(WIDTH, WIDTH),
        }
    )
    net = nn.Sequential(model["good"], model["skipped"], model["special"], model["narrow"])
    qmodel = qinductor.quantize_model(net, [torch.randn(8, WIDTH)], SmoothQuantConfig(skip=("1",)))
    assert _sites(qmodel)["0"]["int8"]
    assert "skip pattern '1'" in _reason(qmodel, "1")
    assert "is a Special" in _reason(qmodel, "2")
    assert "64 inputs and 3 outputs" in _reason(qmodel, "3")
    double = nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ModelError, match="float64"):
        prepare(double[:1])
    assert len(getattr(prepare(double), CALIBRATION_ATTRIBUTE).observers) == 1


def test_too_long_a_row_is_kept() -> None:
    from qinductor import ops

    with torch.device("meta"):
        model = nn.Linear(ops.MAX_K + 1, WIDTH)
    with pytest.raises(ModelError, match="int32 sum could overflow"):
        prepare(model)


def test_the_pooler_is_kept() -> None:
    qmodel = qinductor.quantize_model(TwoLayers(), [token_batch([3, 7], 9, 0, 1)])
    assert "one row a sequence" in _reason(qmodel, "pooler")
    assert sum(site["int8"] for site in _sites(qmodel).values()) == 8


def test_never_reached() -> None:
    class Partly(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x)

    qmodel = qinductor.quantize_model(Partly(nn.ReLU()), [torch.randn(4, WIDTH)])
    assert "never reached" in _reason(qmodel, "second")


def test_tied_weights_stay_tied_and_float() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, WIDTH)
            self.body = nn.Linear(WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, 50, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.body(self.embed(ids)))

    model, ids = Tied(), torch.arange(40).view(2, 20)
    qmodel = qinductor.quantize_model(model, [ids])
    assert "tied to embed" in _reason(qmodel, "head")
    assert qmodel.head.weight is qmodel.embed.weight
    assert relative_error(qmodel(ids), model(ids)) < ROUNDING


def test_a_weight_that_is_read_from_outside_is_kept() -> None:
    class Functional(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y = nn.functional.linear(x, self.first.weight, self.first.bias)
            return self.second(self.activation(y + self.first(x)))

    model, x = Functional(nn.GELU()), torch.randn(9, WIDTH)
    qmodel = qinductor.quantize_model(model, [x])
    assert "read from outside its own call" in _reason(qmodel, "first")
    assert relative_error(qmodel(x), model(x)) < ROUNDING


@pytest.mark.parametrize("config", BOTH)
def test_a_module_used_twice_is_one_int8_module(config: SmoothQuantConfig) -> None:
    """One layer called three times (ALBERT), and one module under two names."""
    torch.manual_seed(0)
    layer = Attention()
    model = nn.Sequential(layer, layer, layer)
    x = torch.randn(2, 5, WIDTH)
    qmodel = qinductor.quantize_model(model, [x], config)
    assert qmodel[0] is qmodel[1] and isinstance(qmodel[2].query, QuantizedLinear)
    assert len(_sites(qmodel)) == 4
    assert relative_error(qmodel(x), model(x)) < ROUNDING
    linear = nn.Linear(WIDTH, WIDTH)
    twice = qinductor.quantize_model(nn.Sequential(linear, nn.GELU(), linear), [x], config)
    assert twice[0] is twice[2] and isinstance(twice[0], QuantizedLinear)


def test_a_module_used_twice_has_the_union_of_both_ranges() -> None:
    linear = nn.Linear(WIDTH, WIDTH)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + self.linear(1000 * x)

    x = torch.randn(9, WIDTH)
    qmodel = qinductor.quantize_model(Scaled(), [x], SmoothQuantConfig(alpha=None))
    assert float(qmodel.linear.x_scale) * 255 == pytest.approx(
        1000 * float(x.max() - x.min()), rel=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", BOTH)
def test_low_precision_models(dtype: torch.dtype, config: SmoothQuantConfig) -> None:
    torch.manual_seed(0)
    model, x = Attention().to(dtype), torch.randn(2, 5, WIDTH).to(dtype)
    qmodel = qinductor.quantize_model(model, [x], config)
    y = qmodel(x)
    assert y.dtype is dtype
    assert relative_error(y, model(x)) < ROUNDING


@pytest.mark.parametrize("config", BOTH)
def test_odd_dimensions_and_single_rows(config: SmoothQuantConfig) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 129, bias=False), nn.ReLU(), nn.Linear(129, 65))
    x = torch.randn(50, 33)
    qmodel = qinductor.quantize_model(model, list(x), config)
    assert relative_error(qmodel(x), model(x)) < ROUNDING
    for few in (x[0], x[:1], x[None, :1]):
        assert qmodel(few).shape == (*few.shape[:-1], 65)


def test_a_bare_linear_is_replaced() -> None:
    x = torch.randn(9, WIDTH)
    qmodel = qinductor.quantize_model(nn.Linear(WIDTH, WIDTH), [x])
    assert isinstance(qmodel, QuantizedLinear) and list(_sites(qmodel)) == [""]


def test_a_channel_that_never_moves_does_not_spoil_the_others() -> None:
    """Its factor may not set the scale of every row."""
    torch.manual_seed(0)
    x = torch.randn(64, WIDTH) * 1e-3
    dead = x.clone()
    dead[:, 5] = 0
    model = Mlp(nn.GELU())
    for config in BOTH:
        error = relative_error(qinductor.quantize_model(model, [dead], config)(dead), model(dead))
        assert error < ROUNDING
    zeros = torch.zeros(4, WIDTH)
    assert torch.isfinite(qinductor.quantize_model(model, [zeros])(zeros)).all()


def test_torchs_encoder_layer_calls_its_int8_linears() -> None:
    """Its fast path would take the weights out of the Linears and compute in float."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    x = torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        qmodel = qinductor.quantize_model(encoder, [x])
        assert _sites(qmodel)["layers.0.linear1"]["int8"]
        assert "NonDynamicallyQuantizableLinear" in _reason(qmodel, "layers.0.self_attn.out_proj")
        calls = []
        qmodel.layers[0].linear1.register_forward_hook(lambda *_: calls.append(1))
        assert relative_error(qmodel(x), encoder(x)) < ROUNDING
        del qmodel.layers[0].linear1._forward_hooks
        qmodel.layers[0].linear1.__dict__["_forward_hooks"] = type(encoder._forward_hooks)()
        original = QuantizedLinear.forward
        try:
            QuantizedLinear.forward = lambda self, x: calls.append(1) or original(self, x)
            qmodel(x)
        finally:
            QuantizedLinear.forward = original
    assert len(calls) == 1 + 4


def test_a_copy_of_a_prepared_model_calibrates_by_itself() -> None:
    prepared = prepare(Mlp(nn.GELU()))
    twin = copy.deepcopy(prepared)
    twin(torch.randn(4, WIDTH))
    assert convert(twin).first.in_features == WIDTH
    with pytest.raises(ConversionError, match="before calibration"):
        convert(prepared)


def test_progress_is_reported() -> None:
    seen: list[tuple[int, int | None]] = []
    batches = [torch.randn(2, WIDTH) for _ in range(3)]
    note = lambda done, total: seen.append((done, total))  # noqa: E731
    qinductor.quantize_model(Mlp(nn.ReLU()), batches, progress=note)
    qinductor.quantize_model(Mlp(nn.ReLU()), iter(batches[:1]), progress=note)
    assert seen == [(1, 3), (2, 3), (3, 3), (1, None)]


def test_a_group_whose_member_is_kept_is_not_folded_into_the_norm() -> None:
    """Scaling a kept Linear's columns would change what else reads its weight."""

    class Peeked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            return self.a(h) + self.b(h) + self.b.weight.sum()

    torch.manual_seed(0)
    model, x = Peeked(), outlier_input(32, WIDTH)
    qmodel = qinductor.quantize_model(model, [x])
    assert "b, kept in float" in _sites(qmodel)["a"]["why"]
    assert relative_error(qmodel(x), model(x)) < ROUNDING
