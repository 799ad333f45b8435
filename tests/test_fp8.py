"""The fp8 linear: its eager body, its contract, its refusals."""

from __future__ import annotations

import pytest
import torch
from tolerances import gamma
from torch import Tensor

import qinductor.fp8
from qinductor.errors import BackwardThroughInt8Error, ConfigError

fp8_linear = torch.ops.qinductor.fp8_linear
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _arguments(dtypes: tuple = (E4M3, E4M3)) -> list[Tensor]:
    torch.manual_seed(0)
    x, w = (torch.randn(s).to(d) for s, d in zip(((2, 3, 40), (7, 40)), dtypes, strict=True))
    return [x, torch.rand(2, 3, 1), w, torch.rand(7), torch.randn(7)]


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E5M2), (E5M2, E4M3)], ids=str)
def test_agrees_with_float64(dtypes: tuple) -> None:
    args = _arguments(dtypes)
    x, x_scale, w, w_scale, bias = (t.double() for t in args)
    exact = x @ w.t() * x_scale * w_scale + bias
    size = x.abs() @ w.abs().t() * x_scale * w_scale + bias.abs()
    assert ((fp8_linear(*args) - exact).abs() <= gamma(44) * size).all()
    # torch's own schema test multiplies the inputs, which it cannot do with fp8.
    torch.library.opcheck(fp8_linear.default, args, test_utils=("test_faketensor",))


def test_one_scale_for_all_rows_and_no_bias() -> None:
    x, _, w, w_scale, _ = _arguments()
    one = torch.tensor(0.25)
    got = fp8_linear(x, one, w, w_scale, None, torch.bfloat16)
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, fp8_linear(x, one.expand(2, 3, 1).contiguous(), w, w_scale).bfloat16())


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(2, 3, 40), "got torch.float32 and torch.float8_e4m3fn"),
        (1, torch.ones(5), "x_scale is torch.float32 of shape"),
        (2, torch.zeros(7, 41).to(E4M3), "with K = 40"),
        (3, torch.ones(7, dtype=torch.float64), "w_scale is torch.float64"),
        (4, torch.ones(8), "bias is torch.float32 of shape"),
    ],
    ids=["x", "x_scale", "weight", "w_scale", "bias"],
)
def test_bad_arguments_are_refused(position: int, value: Tensor, message: str) -> None:
    args = _arguments()
    args[position] = value
    with pytest.raises(ConfigError, match=message):
        fp8_linear(*args)


def test_other_output_dtypes_and_gradients_are_refused() -> None:
    args = _arguments()
    with pytest.raises(ConfigError, match=r"out_dtype=torch\.int8 is not one of"):
        qinductor.fp8.fp8_linear(*args, torch.int8)
    args[4].requires_grad_()
    with pytest.raises(BackwardThroughInt8Error, match="fp8_linear"):
        fp8_linear(*args).sum().backward()
