"""Per-token quantization in one kernel, bit-equal to the eager operator on what is quantized."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from int8_nets import same_bits
from interpreter import Interpreter, interpreter  # noqa: F401 - a fixture
from tolerances import UNIT_ROUNDOFF, gamma
from torch import Tensor

from qinductor.activations import gelu
from qinductor.errors import ConfigError
from qinductor.ops import quantize_per_token
from qinductor.templates.triton import launch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _rows(k: int, dtype: torch.dtype) -> Tensor:
    """Ordinary rows, ties, zeros, huge and tiny numbers."""
    x = torch.randn(6, k, generator=torch.Generator().manual_seed(k)) * 3
    x[1] = 0
    x[2] = (torch.arange(k) % 9 - 4) / 2
    x[2, 0] = 127
    x[3] *= 2.0**12
    x[4] *= 2.0**-20
    return x.to(dtype)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 7, 64, 100])
def test_codes_and_scales_are_those_of_the_eager_operator(
    interpreter: Interpreter,  # noqa: F811
    k: int,
    dtype: torch.dtype,
) -> None:
    x, multiplier = _rows(k, dtype), torch.rand(k) + 0.5
    for given in ({}, {"multiplier": multiplier}, {"divisor": 127.5, "min_scale": 1e-5}):
        codes, scales, produced = interpreter(launch.quantize_rows, x, **given)
        want_codes, want_scales = quantize_per_token(x, **given)
        assert produced is None
        assert torch.equal(codes, want_codes) and same_bits(scales, want_scales)


@pytest.mark.interpret
def test_values_that_are_no_numbers(interpreter: Interpreter) -> None:  # noqa: F811
    x = _rows(20, torch.float32)
    x[0, 3], x[1, 4], x[2, 5] = torch.nan, torch.inf, -torch.inf
    codes, scales, _ = interpreter(launch.quantize_rows, x)
    want_codes, want_scales = quantize_per_token(x)
    assert torch.equal(codes, want_codes) and same_bits(scales, want_scales)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", DTYPES[:1] + DTYPES[2:], ids=str)
@pytest.mark.parametrize("producer", ["layer_norm", "rms_norm", "gelu"])
def test_producers(interpreter: Interpreter, producer: str, dtype: torch.dtype) -> None:  # noqa: F811
    """The codes are those of the produced tensor, which is right to the norm's rounding."""
    k = 50
    x = torch.randn(5, k, generator=torch.Generator().manual_seed(3)).to(dtype)
    weight, bias = torch.rand(k) + 0.5, torch.randn(k)
    given: dict = {}
    if producer != "gelu":
        given["weight"] = weight
    if producer == "layer_norm":
        given["bias"] = bias
    codes, scales, produced = interpreter(launch.quantize_rows, x, producer, store=True, **given)
    want_codes, want_scales = quantize_per_token(produced)
    assert torch.equal(codes, want_codes) and same_bits(scales, want_scales)
    wide = x.double()
    if producer == "gelu":
        assert same_bits(produced, gelu(x.float()).to(dtype))
        return
    if producer == "layer_norm":
        exact = F.layer_norm(wide, (k,), weight.double(), bias.double())
    else:
        exact = F.rms_norm(wide, (k,), weight.double(), 1e-5)
    # Two sums of k terms, of values up to the row's maximum, then six roundings; and one to dtype.
    magnitude = (exact.abs().amax(-1, True) + wide.abs().amax(-1, True) + bias.abs()) * 4
    bound = gamma(2 * k + 6) * magnitude + UNIT_ROUNDOFF[dtype] * exact.abs() * 2
    assert ((produced.double() - exact).abs() <= bound).all()


def test_bad_arguments_are_refused() -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(ConfigError, match=r"unknown producer 'softmax'. Valid: none, layer_norm"):
        launch.quantize_rows(x, "softmax")
    with pytest.raises(ConfigError, match="give weight="):
        launch.quantize_rows(x, "rms_norm")
    with pytest.raises(ConfigError, match="at most 65536"):
        launch.quantize_rows(torch.zeros(1, launch.MAX_ROW + 1))
