"""The GEMM kernel: exact in the interpreter, and what it compiles to."""

from __future__ import annotations

import pytest
import torch
from int8_nets import weight_codes
from interpreter import Interpreter, interpreter  # noqa: F401 - a fixture
from torch import Tensor

from qinductor import ops
from qinductor.errors import ConfigError
from qinductor.templates.triton import launch
from qinductor.templates.triton.tiles import Tile

SMALL = Tile(16, 16, 32, warps=1, stages=1)


def _codes(m: int, k: int) -> Tensor:
    """int8 (M, K) over the whole range, a row of the extremes among them."""
    codes = torch.randint(-128, 128, (m, k), generator=torch.Generator().manual_seed(m + k))
    codes[0], codes[-1, ::2] = -128, 127
    return codes.to(torch.int8)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Exact in int64; wraps around like int32 only where it does not fit."""
    return (a.to(torch.int64) @ b.to(torch.int64).t()).to(torch.int32)


# (M, N, K): 1, odd, 2^k +- 1, narrow, deep.
SHAPES = [
    (1, 1, 1),
    (1, 65, 33),
    (3, 17, 31),
    (16, 16, 32),
    (17, 33, 65),
    (5, 7, 1000),
    (40, 20, 63),
]


@pytest.mark.interpret
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_product_is_exact(interpreter: Interpreter, shape: tuple) -> None:  # noqa: F811
    m, n, k = shape
    a, b = _codes(m, k), weight_codes(n, k)
    got = interpreter(launch.gemm, a, b, SMALL)
    assert got.dtype is torch.int32
    assert torch.equal(got, _product(a, b)[None])


@pytest.mark.interpret
@pytest.mark.parametrize("splits", [2, 3, 8])
def test_splits_of_k_add_up(interpreter: Interpreter, splits: int) -> None:  # noqa: F811
    a, b = _codes(3, 200), weight_codes(20, 200)
    tile = Tile(16, 16, 32, warps=1, stages=1, splits=splits)
    parts = interpreter(launch.gemm, a, b, tile)
    assert parts.shape == (splits, 3, 20)
    assert torch.equal(parts.sum(0, dtype=torch.int32), _product(a, b))
    first = slice(0, tile.split_size(200))
    assert torch.equal(parts[0], _product(a[:, first], b[:, first]))


@pytest.mark.interpret
def test_reads_the_padded_rows_of_a_packed_weight(interpreter: Interpreter) -> None:  # noqa: F811
    """Rows and k beyond N and K belong to the padding; other values there change nothing."""
    a, b = _codes(5, 30), weight_codes(70, 30)
    rows = torch.full((128, 32), 77, dtype=torch.int8)
    rows[:70, :30] = b
    got = interpreter(launch.gemm, a, rows, SMALL, n=70)
    assert torch.equal(got[0], _product(a, b))


@pytest.mark.interpret
def test_the_deepest_product_does_not_overflow(interpreter: Interpreter) -> None:  # noqa: F811
    a = torch.full((1, ops.MAX_K), -128, dtype=torch.int8)
    b = torch.full((1, ops.MAX_K), -128, dtype=torch.int8)
    tile = Tile(16, 16, 512, warps=1, stages=1)
    got = interpreter(launch.gemm, a, b, tile)
    assert got.item() == ops.MAX_K * 128 * 128


@pytest.mark.interpret
@pytest.mark.parametrize("pair", [("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn")], ids=str)
def test_fp8_product_is_exact_where_float32_is(
    interpreter: Interpreter,  # noqa: F811
    pair: tuple[str, str],
) -> None:
    """Small integers: every product and every sum is a float32."""
    left, right = (getattr(torch, f"float8_{name}") for name in pair)
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(-4, 5, (19, 45), generator=generator).float()
    b = torch.randint(-4, 5, (18, 45), generator=generator).float()
    got = interpreter(launch.gemm, a.to(left), b.to(right), SMALL)
    assert got.dtype is torch.float32
    assert torch.equal(got[0], a @ b.t())


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch\.int8 and torch\.float32"):
        launch.gemm(torch.zeros(1, 1, dtype=torch.int8), torch.zeros(1, 1), SMALL)
