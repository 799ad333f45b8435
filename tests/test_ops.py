"""What each operator means, against scalar references in exact arithmetic."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from int8_nets import same_bits, weight_codes

import qinductor.ops
from qinductor.errors import BackwardThroughInt8Error, ConfigError
from qinductor.ops import FLOATS, MAX_K, int_matmul, packed_shape

ops = torch.ops.qinductor
TINY = float(torch.finfo(torch.float32).tiny)
DENORMAL = 2.0**-149
HUGE = float(torch.finfo(torch.float32).max)


# ---------------------------------------------------------------- references


def fl32(value: float) -> np.float32:
    with np.errstate(over="ignore"):
        return np.float32(value)


def rne(value: np.float32) -> float:
    """Nearest integer, ties to even; infinities and NaN stay."""
    return float(round(float(value))) if math.isfinite(value) else float(value)


def scalar_code(x: float, inverse_scale: float, zero_point: int) -> int:
    """The rule of ``quantize``: a product rounded to float32, the rest exact."""
    with np.errstate(all="ignore"):
        code = rne(fl32(x) * fl32(inverse_scale)) + zero_point
    return 0 if math.isnan(code) else int(min(max(code, 0), 255))


def scalar_per_token(
    row: list[float], divisor: float, min_scale: float
) -> tuple[list[int], np.float32]:
    """The rule of ``quantize_per_token`` for finite rows."""
    with np.errstate(all="ignore"):
        amax = max(abs(fl32(x)) for x in row)
        scale = max(fl32(amax) / fl32(divisor), fl32(min_scale))
        inverse = fl32(1) / scale
        codes = [min(max(rne(fl32(x) * inverse), -128), 127) + 128 for x in row]
    return [0 if math.isnan(c) else int(c) for c in codes], scale


def i32(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32)


# ---------------------------------------------------------------- quantize

SPECIAL = [
    0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127.5, 128.5, 254.5, 255.5, -127.5, -128.5,
    math.inf, -math.inf, math.nan, HUGE, -HUGE, TINY, -TINY, DENORMAL, -DENORMAL, 2.0**24 + 2,
]  # fmt: skip


@pytest.mark.parametrize("zero_point", [0, 1, 128, 255])
@pytest.mark.parametrize("inverse_scale", [1.0, 1 / 3, 100.0, TINY, DENORMAL, HUGE, math.inf])
def test_quantize_special_values(inverse_scale: float, zero_point: int) -> None:
    got = ops.quantize(torch.tensor(SPECIAL), torch.tensor(inverse_scale), i32(zero_point))
    assert got.dtype is torch.uint8
    assert got.tolist() == [scalar_code(x, inverse_scale, zero_point) for x in SPECIAL]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(width=32), min_size=1, max_size=9),
    st.floats(min_value=0, width=32, allow_nan=False),
    st.integers(0, 255),
)
def test_quantize_follows_the_rule(xs: list[float], inverse_scale: float, zero_point: int) -> None:
    got = ops.quantize(torch.tensor(xs), torch.tensor([inverse_scale]), i32(zero_point))
    assert got.tolist() == [scalar_code(x, inverse_scale, zero_point) for x in xs]


@pytest.mark.parametrize("dtype", FLOATS)
def test_quantize_widens_and_takes_one_scale_a_channel(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 7).to(dtype)
    inverse = torch.rand(7) * 50
    got = ops.quantize(x, inverse, torch.tensor([9], dtype=torch.int32))
    rows = x.float().view(-1, 7).tolist()
    want = [[scalar_code(v, float(s), 9) for v, s in zip(r, inverse, strict=True)] for r in rows]
    assert got.view(-1, 7).tolist() == want


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(2, 4, dtype=torch.float64)}, "x is torch.float64"),
        (
            {"inverse_scale": torch.ones(2, 4)},
            r"inverse_scale is .*\(2, 4\).*\(\), \(1,\) or \(K,\)",
        ),
        ({"inverse_scale": torch.ones(3)}, r"inverse_scale is .*\(3,\)"),
        ({"inverse_scale": torch.ones(4).bfloat16()}, "inverse_scale is torch.bfloat16"),
        ({"zero_point": torch.zeros(4, dtype=torch.int32)}, "zero_point is"),
        ({"zero_point": torch.tensor(0)}, "zero_point is torch.int64"),
    ],
)
def test_quantize_refuses(changed: dict[str, torch.Tensor], message: str) -> None:
    args = {"x": torch.zeros(2, 4), "inverse_scale": torch.ones(()), "zero_point": i32(0)}
    with pytest.raises(ConfigError, match=message):
        ops.quantize(**(args | changed))


# ---------------------------------------------------------------- quantize_per_token

FINITE_ROWS = [
    [0.0, 0.0, -0.0],
    [DENORMAL, -DENORMAL, 0.0],
    [TINY, TINY * 3, -TINY],
    [HUGE, -HUGE, 1.0],
    [1.0, 0.5, -0.25],
    [127.0, 0.5, 1.5],
    [-127.0, 2.5, -2.5],
]


@pytest.mark.parametrize("divisor", [127.0, 127.5])
@pytest.mark.parametrize("min_scale", [TINY, 1e-5])
def test_per_token_special_rows(divisor: float, min_scale: float) -> None:
    codes, scale = ops.quantize_per_token(torch.tensor(FINITE_ROWS), None, divisor, min_scale)
    assert scale.shape == (len(FINITE_ROWS), 1) and scale.dtype is torch.float32
    for row, got, s in zip(FINITE_ROWS, codes, scale, strict=True):
        want, want_scale = scalar_per_token(row, divisor, min_scale)
        assert (got.tolist(), float(s)) == (want, float(want_scale)), row


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_per_token_follows_the_rule(row: list[float]) -> None:
    codes, scale = ops.quantize_per_token(torch.tensor([row]))
    want, want_scale = scalar_per_token(row, 127.0, TINY)
    assert codes[0].tolist() == want
    assert float(scale) == float(want_scale)


def test_per_token_zero_row_dequantizes_to_zero() -> None:
    codes, scale = ops.quantize_per_token(torch.zeros(2, 5))
    assert (codes == 128).all() and (scale == TINY).all()


def test_per_token_row_with_nan_or_inf_stays_visible() -> None:
    x = torch.ones(3, 4)
    x[0, 1], x[1, 1] = torch.nan, torch.inf
    codes, scale = ops.quantize_per_token(x)
    assert scale[0].isnan() and scale[1] == torch.inf  # every output of these rows is not finite
    assert codes[2].tolist() == [255] * 4


def test_per_token_multiplier_is_applied_first() -> None:
    x, multiplier = torch.randn(5, 7), torch.rand(7) + 0.1
    got = ops.quantize_per_token(x, multiplier)
    want = ops.quantize_per_token(x * multiplier)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_no_rows() -> None:
    codes, scale = ops.quantize_per_token(torch.zeros(0, 8))
    layer = _layer(3, 8)
    out = ops.qlinear(codes, scale, i32(128), *layer)
    assert out.shape == (0, 3)


# ---------------------------------------------------------------- packed weights


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 140), st.integers(1, 70))
def test_pack_and_unpack(n: int, k: int) -> None:
    weight = weight_codes(n, k)
    packed = ops.pack_weight(weight)
    assert tuple(packed.shape) == packed_shape(n, k) and packed.is_contiguous()
    assert torch.equal(ops.unpack_weight(packed, n, k), weight)
    row, column = n // 2, k - 1
    assert packed[row // 64, column // 4, row % 64, column % 4] == weight[row, column]
    assert packed.sum(dtype=torch.int64) == weight.sum(dtype=torch.int64)  # the padding is zero


def test_pack_takes_any_strides() -> None:
    weight = weight_codes(10, 6)
    assert torch.equal(ops.pack_weight(weight.t().contiguous().t()), ops.pack_weight(weight))


# ---------------------------------------------------------------- int8 products


@pytest.mark.parametrize("k", [1, 511, 512, 513, 3072, MAX_K])
def test_int_matmul_extremes_are_exact(k: int) -> None:
    x = torch.full((2, k), 255, dtype=torch.uint8)
    x[1, ::2] = 0
    weight = torch.full((2, k), -128, dtype=torch.int8)
    weight[1] = 127
    want = x.long() @ weight.long().t()
    assert torch.equal(int_matmul(x, weight).long(), want)


def test_max_k_is_the_last_that_fits() -> None:
    assert MAX_K == 65793
    assert 255 * 128 * MAX_K < 2**31 <= 255 * 128 * (MAX_K + 1)


def test_int_matmul_stays_exact_under_autocast_and_lower_matmul_precision() -> None:
    x = torch.randint(0, 256, (7, 600), dtype=torch.uint8)
    weight = weight_codes(9, 600)
    want = (x.long() @ weight.long().t()).int()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16):
            got = int_matmul(x, weight)
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(got, want)


# ---------------------------------------------------------------- qlinear


def _layer(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = weight_codes(n, k)
    return ops.pack_weight(weight), torch.rand(n) / k, weight.sum(dim=1, dtype=torch.int32)


@pytest.mark.parametrize("per_token", [False, True])
def test_qlinear_against_int64(per_token: bool) -> None:
    n, k, zero_point = 65, 130, 77
    packed, w_scale, w_sum = _layer(n, k)
    x = torch.randint(0, 256, (2, 3, k), dtype=torch.uint8)
    x_scale = torch.rand(2, 3, 1) if per_token else torch.tensor(0.02)
    bias, residual = torch.randn(n), torch.randn(2, 3, n)
    got = ops.qlinear(x, x_scale, i32(zero_point), packed, w_scale, w_sum, bias, residual, "relu")
    weight = ops.unpack_weight(packed, n, k)
    acc = (x.long() - zero_point) @ weight.long().t()
    y = torch.relu(acc.float() * x_scale * w_scale + bias) + residual
    assert same_bits(got, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_qlinear_rounds_once_to_its_output_dtype(dtype: torch.dtype) -> None:
    layer = _layer(5, 8)
    x = torch.randint(0, 256, (4, 8), dtype=torch.uint8)
    full = ops.qlinear(x, torch.tensor(0.1), i32(3), *layer)
    assert same_bits(
        ops.qlinear(x, torch.tensor(0.1), i32(3), *layer, out_dtype=dtype), full.to(dtype)
    )
    codes = ops.qlinear(
        x, torch.tensor(0.1), i32(3), *layer, None, None, "none", torch.uint8,
        torch.tensor(20.0), i32(4),
    )  # fmt: skip
    assert torch.equal(codes, ops.quantize(full, torch.tensor(20.0), i32(4)))


def _arguments() -> dict[str, Any]:
    packed, w_scale, w_sum = _layer(4, 8)
    return {
        "x": torch.zeros(3, 8, dtype=torch.uint8),
        "x_scale": torch.ones(()),
        "x_zero_point": i32(0),
        "packed": packed,
        "w_scale": w_scale,
        "w_sum": w_sum,
    }


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.zeros(3, 8)}, "uint8 codes.*got torch.float32.*Quantize the input"),
    (
        {"packed": torch.zeros(4, 8, dtype=torch.int8)},
        r"packed weight has shape \(4, 8\).*pack_weight",
    ),
    ({"x": torch.zeros(3, 9, dtype=torch.uint8)}, "K=9 needs"),
    ({"activation": "swish"}, "unknown activation 'swish'. Valid: none, relu, gelu"),
    ({"out_dtype": torch.float64}, "out_dtype=torch.float64 is not one of torch.float32"),
    ({"out_dtype": torch.uint8}, "out_inverse_scale and out_zero_point are needed"),
    ({"out_inverse_scale": torch.ones(()), "out_zero_point": i32(0)}, "only then"),
    ({"x_scale": torch.ones(2, 1)}, r"x_scale is torch.float32 of shape \(2, 1\)"),
    ({"x_scale": torch.ones(()).double()}, "x_scale is torch.float64"),
    ({"x_zero_point": torch.zeros(3, dtype=torch.int32)}, "x_zero_point is"),
    ({"x_zero_point": torch.tensor(0)}, "x_zero_point is torch.int64"),
    ({"w_sum": torch.zeros(1, dtype=torch.int32)}, r"w_sum is torch.int32 of shape \(1,\)"),
    ({"w_scale": torch.ones(4).bfloat16()}, "w_scale is torch.bfloat16"),
    ({"bias": torch.zeros(1)}, r"bias is torch.float32 of shape \(1,\).*\(4,\)"),
    ({"residual": torch.zeros(4)}, r"residual is torch.float32 of shape \(4,\).*\(3, 4\)"),
    (
        {"out_dtype": torch.uint8, "out_inverse_scale": torch.ones(3), "out_zero_point": i32(0)},
        r"out_inverse_scale is torch.float32 of shape \(3,\)",
    ),
]


@pytest.mark.parametrize(
    ("changed", "message"), REFUSALS, ids=lambda v: next(iter(v)) if isinstance(v, dict) else ""
)
@pytest.mark.parametrize("fake", [False, True], ids=["eager", "fake"])
def test_qlinear_refuses(changed: dict[str, Any], message: str, fake: bool) -> None:
    arguments = _arguments() | changed
    if fake:
        arguments = {
            name: value.to("meta") if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }
    with pytest.raises(ConfigError, match=message):
        ops.qlinear(**arguments)


@pytest.mark.parametrize("k", [MAX_K, MAX_K + 1])
def test_k_bound(k: int) -> None:
    packed, w_scale, w_sum = (t.to("meta") for t in _layer(1, k))
    x = torch.zeros(1, k, dtype=torch.uint8, device="meta")
    call = (x, torch.ones((), device="meta"), i32(0).to("meta"), packed, w_scale, w_sum)
    if k <= MAX_K:
        assert ops.qlinear(*call).shape == (1, 1)
    else:
        with pytest.raises(ConfigError, match=f"K={k} can overflow.*{MAX_K} is exact.*Split"):
            ops.qlinear(*call)


# ---------------------------------------------------------------- what torch asks of an operator


def _opcheck_cases() -> list[tuple[str, tuple[Any, ...]]]:
    packed, w_scale, w_sum = _layer(5, 7)
    codes = torch.randint(0, 256, (2, 3, 7), dtype=torch.uint8)
    one, zero = torch.tensor(0.5), i32(3)
    transposed = torch.randn(7, 3).t()
    q = (codes, one, zero, packed, w_scale, w_sum)
    addend = torch.randn(2, 5, 3).transpose(1, 2)
    per_token = (codes, torch.rand(2, 3, 1), *q[2:])
    return [
        ("quantize", (torch.randn(2, 7), one, zero)),
        ("quantize", (transposed, torch.rand(7), zero)),
        ("quantize", (torch.randn(1, 7).expand(3, 7), one, zero)),
        ("quantize_per_token", (torch.randn(2, 3, 7), torch.rand(7))),
        ("quantize_per_token", (transposed,)),
        ("pack_weight", (weight_codes(5, 7),)),
        ("unpack_weight", (packed, 5, 7)),
        ("qlinear", q),
        ("qlinear", (*q, torch.randn(5), addend, "gelu", torch.bfloat16)),
        ("qlinear", (*per_token, None, None, "relu", torch.uint8, torch.rand(5), zero)),
        ("inference_scale", (one, torch.randn(2, 7))),
        ("check_nan", (torch.randn(2, 7), "layer.0")),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "args"), _opcheck_cases(), ids=lambda v: v if isinstance(v, str) else ""
)
def test_opcheck(name: str, args: tuple[Any, ...]) -> None:
    torch.library.opcheck(getattr(ops, name).default, args)


def test_every_operator_of_the_module_is_opchecked() -> None:
    text = Path(qinductor.ops.__file__).read_text(encoding="utf-8")
    defined = set(re.findall(r'define\(\s*"(\w+)\(', text))
    raises_by_design = {"no_gradient"}
    assert {name for name, _ in _opcheck_cases()} == defined - raises_by_design


@pytest.mark.parametrize("op", ["quantize_per_token", "inference_scale"])
def test_backward_is_refused_and_names_the_op(op: str) -> None:
    packed, w_scale, w_sum = _layer(5, 7)
    x = torch.randn(2, 7, requires_grad=True)
    if op == "quantize_per_token":
        codes, scale = ops.quantize_per_token(x)
    else:
        codes = ops.quantize(x, torch.tensor(10.0), i32(3))
        scale = ops.inference_scale(torch.tensor(0.1), x)
    y = ops.qlinear(codes, scale, i32(128), packed, w_scale, w_sum)
    with pytest.raises(
        BackwardThroughInt8Error, match="qinductor::qlinear has no gradient"
    ) as info:
        y.sum().backward()
    assert info.value.op == "qinductor::qlinear"
    with pytest.raises(BackwardThroughInt8Error, match=f"qinductor::{op}"):
        scale.sum().backward()
