"""Where smoothing factors go, and that putting them there changes no float function."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from sq_nets import WIDTH, Attention, Mlp, PreNorm, SharedInput, outlier_input, relative_error
from torch import Tensor, nn
from torch.nn import functional as F

from qinductor.smoothquant import SmoothQuantConfig, prepare
from qinductor.smoothquant.calibration import CALIBRATION_ATTRIBUTE
from qinductor.smoothquant.converting import SmoothedGroup, smoothed_groups
from qinductor.smoothquant.sites import Fold

STATIC = SmoothQuantConfig()


def _folded(
    model: nn.Module, *inputs: Tensor, config: SmoothQuantConfig = STATIC
) -> tuple[nn.Module, dict[str, SmoothedGroup]]:
    """Calibrate, fold, and stop before anything is quantized."""
    prepared = prepare(model, config)
    with torch.no_grad():
        for x in inputs:
            prepared(x)
    calibration = getattr(prepared, CALIBRATION_ATTRIBUTE)
    groups = list(smoothed_groups(prepared, calibration, {}))
    calibration.detach()
    return prepared, {name: group for group in groups for name in group.decision.group}


def _assert_same_function(folded: nn.Module, model: nn.Module, x: Tensor, k: int) -> None:
    """Folding rounds each weight twice and each sum of k terms anew: (k + 4) eps of the scale."""
    with torch.no_grad():
        expected = model(x)
        error = (folded(x) - expected).abs().max()
    eps = torch.finfo(expected.dtype).eps
    assert float(error) <= (k + 4) * eps * float(expected.abs().max())


# ---------------------------------------------------------------- into a norm


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_into_a_norm_that_only_the_group_reads(norm: type[nn.Module]) -> None:
    model, x = PreNorm(norm), outlier_input(3, 7, WIDTH)
    folded, groups = _folded(model, x)
    decision = groups["up"].decision
    assert decision.fold is Fold.NORM and decision.into == "norm" and decision.why is None
    assert set(decision.group) == {"up", "gate"} and groups["up"].columns is None
    assert not torch.equal(folded.norm.weight, model.norm.weight)
    _assert_same_function(folded, model, x, 128)


@pytest.mark.parametrize("activation", ["static", "dynamic"])
def test_not_into_a_norm_that_a_residual_reads(activation: str) -> None:
    class PostNorm(PreNorm):
        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            return h + self.down(F.silu(self.gate(h)) * self.up(h))

    model, x = PostNorm(), outlier_input(5, WIDTH)
    folded, groups = _folded(model, x, config=SmoothQuantConfig(activation=activation))
    decision = groups["up"].decision
    assert decision.fold is (Fold.QUANTIZER if activation == "static" else Fold.MULTIPLY)
    assert "also read by add" in decision.why
    assert torch.equal(folded.norm.weight, model.norm.weight)
    scales = groups["up"].buffers
    assert ("multiplier" in scales) == (activation == "dynamic")
    if activation == "static":
        assert scales["x_inverse_scale"].shape == (WIDTH,) and scales["x_scale"].shape == ()


def test_not_into_a_norm_whose_output_is_returned() -> None:
    class Returned(PreNorm):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.norm(x)
            return {
                "hidden": h,
                "up": self.up(h),
                "gate": self.gate(h),
                "down": self.down(self.up(h)),
            }

    _, groups = _folded(Returned(), outlier_input(5, WIDTH))
    assert "returns it" in groups["up"].decision.why


def test_not_into_a_norm_that_is_used_twice() -> None:
    class Twice(PreNorm):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(self.norm(x))) + self.norm(x)

    _, groups = _folded(Twice(), outlier_input(5, WIDTH))
    assert "norm is also used for something else" in groups["up"].decision.why


def test_not_into_a_norm_in_a_branch_that_one_batch_takes() -> None:
    """What holds for the first batch only is no ground for folding."""

    class Branch(PreNorm):
        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            y = self.up(h) + self.gate(h)
            return self.down(y) + h if x.shape[0] == 9 else self.down(y)

    model = Branch()
    _, groups = _folded(model, outlier_input(5, WIDTH))
    assert groups["up"].decision.fold is Fold.NORM
    _, groups = _folded(model, outlier_input(5, WIDTH), outlier_input(9, WIDTH))
    assert groups["up"].decision.fold is Fold.QUANTIZER


def test_not_into_a_norm_without_or_with_shared_parameters() -> None:
    bare = PreNorm()
    bare.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
    _, groups = _folded(bare, outlier_input(5, WIDTH))
    assert "no weight of its own" in groups["up"].decision.why
    tied = nn.Sequential(PreNorm(), PreNorm())
    tied[1].norm.weight = tied[0].norm.weight
    _, groups = _folded(tied, outlier_input(5, WIDTH))
    assert "no weight of its own" in groups["1.up"].decision.why


def test_not_where_another_linear_kept_in_float_reads_along() -> None:
    config = SmoothQuantConfig(skip=("gate",))
    _, groups = _folded(PreNorm(), outlier_input(5, WIDTH), config=config)
    assert "gate, which is kept in float" in groups["up"].decision.why


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_folding_a_low_precision_norm_is_exact(dtype: torch.dtype) -> None:
    """Factors are powers of two there, so that nothing is rounded."""
    model = PreNorm().to(dtype)
    x = outlier_input(6, WIDTH).to(dtype)
    folded, groups = _folded(model, x)
    assert groups["up"].decision.fold is Fold.NORM
    ratio = model.norm.weight.float() / folded.norm.weight.float()
    assert torch.equal(ratio.log2(), ratio.log2().round())
    assert torch.equal(folded.up(folded.norm(x)), model.up(model.norm(x)))


# ---------------------------------------------------------------- into a Linear


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("written_out", [False, True])
def test_into_the_value_projection_through_attention(heads: int, written_out: bool) -> None:
    model, x = Attention(heads, written_out), outlier_input(2, 6, WIDTH)
    folded, groups = _folded(model, x)
    assert groups["out"].decision.fold is Fold.LINEAR and groups["out"].decision.into == "value"
    assert not torch.equal(folded.value.weight, model.value.weight)
    _assert_same_function(folded, model, x, WIDTH)


def test_into_the_value_rows_of_a_fused_projection() -> None:
    model, x = Attention(fused_qkv=True), outlier_input(2, 6, WIDTH)
    folded, groups = _folded(model, x)
    assert groups["out"].decision.into == "fused"
    assert groups["out"].decision.rows == tuple(range(2 * WIDTH, 3 * WIDTH))
    assert torch.equal(folded.fused.weight[:WIDTH], model.fused.weight[:WIDTH])
    _assert_same_function(folded, model, x, WIDTH)


def test_channels_that_move_are_followed() -> None:
    """Heads that come back in another order: channel k is not row k, and the fold knows it."""

    class Swapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x).view(-1, 4, 16).transpose(1, 2).reshape(-1, WIDTH)
            return self.b(y)

    model, x = Swapped(), outlier_input(5, WIDTH)
    folded, groups = _folded(model, x)
    rows = groups["b"].decision.rows
    assert rows[:5] == (0, 16, 32, 48, 1) and sorted(rows) == list(range(WIDTH))
    _assert_same_function(folded, model, x, WIDTH)


def test_not_into_a_linear_whose_channels_are_mixed_with_tokens() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).transpose(0, 1))

    _, groups = _folded(Mixed(), outlier_input(WIDTH, WIDTH))
    assert "channels are mixed" in groups["b"].decision.why


@pytest.mark.parametrize(
    "activation", [nn.ReLU(), nn.ReLU(inplace=True), nn.LeakyReLU(), nn.Identity()]
)
def test_into_a_linear_before_a_homogeneous_activation(activation: nn.Module) -> None:
    model, x = Mlp(activation), outlier_input(9, WIDTH)
    folded, groups = _folded(model, x)
    assert groups["second"].decision.fold is Fold.LINEAR
    assert groups["second"].decision.into == "first"
    _assert_same_function(folded, model, x, 128)


@pytest.mark.parametrize("activation", [nn.GELU(), nn.SiLU(), nn.Tanh(), nn.Softplus()])
def test_not_through_an_activation_that_does_not_commute(activation: nn.Module) -> None:
    model, x = Mlp(activation), outlier_input(9, WIDTH)
    folded, groups = _folded(model, x)
    assert "does not commute with scaling" in groups["second"].decision.why
    assert torch.equal(folded.first.weight, model.first.weight)
    assert torch.equal(folded(x), model(x))


@pytest.mark.parametrize(
    "rounded",
    [
        lambda x: torch.div(x, 2, rounding_mode="floor"),
        lambda x: x.div(2, rounding_mode="trunc"),
        lambda x: (x * 4).to(torch.int32).to(x.dtype),
        lambda x: (x * 4).type_as(torch.ones((), dtype=torch.int16)).float(),
    ],
    ids=["floor", "trunc", "to", "type_as"],
)
def test_not_through_a_rounding_to_integers(rounded: Callable[[Tensor], Tensor]) -> None:
    class Rounding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return rounded(x)

    model, x = Mlp(Rounding()), outlier_input(9, WIDTH)
    folded, groups = _folded(model, x)
    assert "does not commute with scaling" in groups["second"].decision.why
    assert torch.equal(folded.first.weight, model.first.weight)


def test_through_a_division_that_does_not_round() -> None:
    class Halved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.div(x, 2, rounding_mode=None)

    model, x = Mlp(Halved()), outlier_input(9, WIDTH)
    folded, groups = _folded(model, x)
    assert groups["second"].decision.into == "first"
    _assert_same_function(folded, model, x, 128)


def test_not_into_a_linear_that_something_else_reads() -> None:
    class Tapped(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.second(F.relu(y)) + y[..., :WIDTH]

    _, groups = _folded(Tapped(nn.ReLU()), outlier_input(9, WIDTH))
    assert "another reader" in groups["second"].decision.why


def test_not_into_a_linear_whose_view_is_written() -> None:
    class Written(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            y[:, :3].mul_(-1).exp_()
            return self.second(F.relu(y))

    _, groups = _folded(Written(nn.ReLU()), outlier_input(9, WIDTH))
    assert groups["second"].decision.fold is Fold.QUANTIZER


def test_not_into_a_linear_whose_weight_something_else_reads() -> None:
    class Peek(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(F.relu(self.first(x))) + self.first.weight.sum()

    _, groups = _folded(Peek(nn.ReLU()), outlier_input(9, WIDTH))
    assert "also read by something else" in groups["second"].decision.why


def test_reading_a_weights_dtype_is_not_reading_the_weight() -> None:
    class Cast(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(F.relu(self.first(x.to(self.first.weight.dtype))))

    _, groups = _folded(Cast(nn.ReLU()), outlier_input(9, WIDTH))
    assert groups["second"].decision.fold is Fold.LINEAR


def test_a_linear_used_twice_is_not_folded_into() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(F.relu(self.a(x)))

    model, x = Loop(), outlier_input(4, WIDTH)
    folded, groups = _folded(model, x)
    assert groups["a"].decision.fold is Fold.QUANTIZER
    assert torch.equal(folded.a.weight, model.a.weight)


def test_chained_folds_end_in_the_same_function() -> None:
    """Each Linear of a ReLU chain takes the next one's factors; the last group goes first."""
    torch.manual_seed(1)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    x = outlier_input(32, WIDTH)
    folded, groups = _folded(model, x)
    assert [groups[n].decision.into for n in ("2", "4", "6")] == ["0", "2", "4"]
    _assert_same_function(folded, model, x, 4 * WIDTH)


# ---------------------------------------------------------------- groups


def test_readers_of_one_tensor_share_factor_and_scale() -> None:
    model, x = SharedInput(), outlier_input(2, 5, WIDTH)
    _, groups = _folded(model, x)
    assert groups["a"] is groups["b"] and groups["a"].decision.group == ("a", "b")
    w_max = torch.maximum(model.a.weight.abs().amax(0), model.b.weight.abs().amax(0))
    expected = (x.reshape(-1, WIDTH).abs().amax(0) / w_max).sqrt()
    torch.testing.assert_close(groups["a"].columns, expected, rtol=4e-7, atol=0)


def test_without_alpha_nothing_is_smoothed() -> None:
    model, x = PreNorm(), outlier_input(5, WIDTH)
    folded, groups = _folded(model, x, config=SmoothQuantConfig(alpha=None))
    assert all(g.decision.fold is Fold.NONE and g.columns is None for g in groups.values())
    assert torch.equal(folded(x), model(x))


def test_smoothing_lowers_the_error_of_an_input_with_outliers() -> None:
    import qinductor

    torch.manual_seed(2)
    model, x = Mlp(nn.GELU()), outlier_input(256, WIDTH)
    errors = {}
    for activation in ("static", "dynamic"):
        for alpha in (None, 0.5):
            config = SmoothQuantConfig(alpha=alpha, activation=activation)
            qmodel = qinductor.quantize_model(copy.deepcopy(model), [x], config)
            errors[activation, alpha] = relative_error(qmodel(x), model(x))
    assert errors["static", 0.5] < errors["static", None]
    assert errors["dynamic", 0.5] < errors["dynamic", None]
