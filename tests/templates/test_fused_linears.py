"""Merged int8 linears and int8 linears by rows, on every instruction set, against eager operators.

All kernels of one instruction set are one function whose number of rows is unknown, so that the
code for few rows, which deals out the columns, and for many, which deals out the rows, is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from int8_nets import same_bits, scales, weight_codes
from tolerances import layer_norm_bound
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from qinductor.capability import Isa
from qinductor.errors import ConfigError
from qinductor.fused_ops import QUANTIZERS, qlinear_merged, qlinear_rows
from qinductor.ops import qlinear, quantize, quantize_per_token
from qinductor.templates import TEMPLATES

ops = torch.ops.qinductor
F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

ISAS = [
    pytest.param(isa.value, marks=() if isa is Isa.PORTABLE else pytest.mark.isa(isa.value))
    for isa in Isa
]
ROWS = (130, 0, 1, 5, 23, 24, 25)
EPS = 1e-5
CLASS = {i.isa.value: i.cpp_class for i in TEMPLATES["qlinear_rows", "cpu"]}


def _weight(n: int, k: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed codes, scales, sums, bias."""
    g = torch.Generator().manual_seed(seed)
    codes = weight_codes(n, k, seed=seed)
    w_scale = (torch.rand(n, generator=g) + 0.5) / (25 * k**0.5)
    bias = torch.randn(n, generator=g)
    return ops.pack_weight(codes), w_scale, codes.sum(dim=1, dtype=torch.int32), bias


def _codes(m: int, k: int) -> Tensor:
    x = torch.randint(0, 256, (m, k), generator=torch.Generator().manual_seed(m + k))
    return x.to(torch.uint8)


def _token_scales(m: int) -> Tensor:
    return torch.rand(m, 1, generator=torch.Generator().manual_seed(m)).mul_(0.05)


STATIC = scales()


@dataclass(frozen=True)
class Merged:
    """One call of qlinear_merged."""

    weights: int
    n: int
    k: int
    out: torch.dtype
    bias: bool = True
    per_token: bool = False

    @functools.cached_property
    def lists(self) -> tuple[list[Tensor], ...]:
        packed, w_scale, w_sum, bias = zip(
            *(_weight(self.n, self.k, seed) for seed in range(self.weights)), strict=True
        )
        return list(packed), list(w_scale), list(w_sum), list(bias) if self.bias else []

    def inputs(self, m: int) -> tuple[Any, ...]:
        return _codes(m, self.k), _token_scales(m), self.lists

    def arguments(self, x: Tensor, token_scales: Tensor, lists: Any) -> tuple[Any, ...]:
        scale = token_scales if self.per_token else STATIC["x_scale"]
        return (x, scale, STATIC["x_zero_point"], *lists, self.out)


@dataclass(frozen=True)
class Rows:
    """One call of qlinear_rows."""

    n: int
    k: int
    activation: str = "none"
    residual: torch.dtype | None = None
    norm: torch.dtype | None = None
    keeps: bool = False
    quantizer: str = "none"
    per_channel: bool = False
    per_token: bool = False

    @functools.cached_property
    def layer(self) -> dict[str, Any]:
        g = torch.Generator().manual_seed(self.n)
        per_column = torch.rand(self.n, generator=g) * 20 + 1
        scale = per_column if self.per_channel else torch.tensor(17.0)
        fixed = self.quantizer == "fixed"
        norm = (None, None)
        if self.norm is not None:
            norm = tuple(torch.randn(self.n, generator=g).to(self.norm) for _ in range(2))
        return {
            "weight": _weight(self.n, self.k, 7),
            "norm": norm,
            "fixed": (scale, torch.tensor(101, dtype=torch.int32)) if fixed else (None, None),
            "multiplier": per_column if self.per_channel and not fixed else None,
        }

    def inputs(self, m: int) -> tuple[Any, ...]:
        """Row 1's residual has a NaN, row 2's an infinity."""
        residual = None
        if self.residual is not None:
            residual = torch.randn(m, self.n, generator=torch.Generator().manual_seed(m))
            residual = residual.to(self.residual)
            residual[1:2, 0], residual[2:3, -1] = torch.nan, torch.inf
        return _codes(m, self.k), _token_scales(m), residual, self.layer

    def arguments(
        self, x: Tensor, token_scales: Tensor, residual: Tensor | None, layer: dict[str, Any]
    ) -> tuple[Any, ...]:
        scale = token_scales if self.per_token else STATIC["x_scale"]
        return (
            x, scale, STATIC["x_zero_point"], *layer["weight"], residual, self.activation,
            *layer["norm"], EPS, self.keeps, self.quantizer, *layer["fixed"], layer["multiplier"],
            127.0, 2.0**-126,
        )  # fmt: skip


CASES = (
    Merged(3, 64, 64, BF16),
    Merged(2, 70, 13, F32, bias=False, per_token=True),
    Merged(3, 5, 130, FP16, per_token=True),
    Rows(1, 3, quantizer="per_token"),
    Rows(17, 5, norm=F32, keeps=True),
    Rows(64, 64, "relu", F32, keeps=True, quantizer="per_token", per_channel=True, per_token=True),
    Rows(70, 130, "gelu", quantizer="per_token", per_channel=True),
    Rows(130, 64, "none", F32, F32, True, "per_token", per_token=True),
    Rows(130, 64, "none", BF16, BF16, True, "fixed", per_channel=True),
    Rows(200, 16, "none", F32, F32, True, "fixed"),
    Rows(96, 16, "tanh", None, F32, False, "per_token", per_channel=True),
)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _all_cases(inputs: list[tuple[Any, ...]]) -> list[Any]:
    return [
        (ops.qlinear_merged if isinstance(case, Merged) else ops.qlinear_rows)(
            *case.arguments(*given)
        )
        for case, given in zip(CASES, inputs, strict=True)
    ]


def _inputs(m: int) -> list[tuple[Any, ...]]:
    inputs = [case.inputs(m) for case in CASES]
    for given in inputs:
        for tensor in given[:3]:
            if isinstance(tensor, Tensor):
                torch._dynamo.decorators.mark_unbacked(tensor, 0)
    return inputs


_NORMALIZED: dict[str, list[Tensor]] = {}
"""Instruction set → float outputs of the normalizations at the first number of rows."""


@pytest.mark.parametrize("isa", ISAS)
def test_every_isa_equals_the_eager_operators(isa: str) -> None:
    compiled = torch.compile(_all_cases, backend="qsim", fullgraph=True, options={"isa": isa})
    outputs, (code,) = run_and_get_code(compiled, _inputs(ROWS[0]))
    merged = sum(isinstance(case, Merged) for case in CASES)
    assert code.count(f"qinductor::gemm<qinductor::{CLASS[isa]},") == merged
    assert code.count(f"qinductor::gemm_rows<qinductor::{CLASS[isa]},") == len(CASES) - merged
    kept = _compare(outputs, ROWS[0])
    with torch.compiler.set_stance("fail_on_recompile"):
        for m in ROWS[1:]:
            _compare(compiled(_inputs(m)), m)
    # The order of a row's sums is fixed: every instruction set gives the same bits.
    _NORMALIZED[isa] = kept
    first = next(iter(_NORMALIZED.values()))
    assert all(same_bits(a, b) for a, b in zip(first, kept, strict=True))


def _compare(outputs: list[Any], m: int) -> list[Tensor]:
    kept = []
    for case, got, given in zip(CASES, outputs, _inputs(m), strict=True):
        if isinstance(case, Merged):
            assert same_bits(got, qlinear_merged(*case.arguments(*given))), f"{case} at M={m}"
        elif case.norm is None:
            want = qlinear_rows(*case.arguments(*given))
            assert len(got) == len(want)
            assert all(same_bits(a, b) for a, b in zip(got, want, strict=True)), f"{case} at M={m}"
        else:
            kept.extend(_check_normalized(case, got, given))
    return kept


def _check_normalized(case: Rows, got: list[Tensor], given: tuple[Any, ...]) -> list[Tensor]:
    """The kernel's rows within the bound of the exact ones; its codes exactly those of its rows."""
    x, scale, zero_point, *weight, residual, activation, w, b, _, _, _ = case.arguments(*given)[:14]
    y = qlinear(x, scale, zero_point, *weight, residual, activation)
    exact = torch.nn.functional.layer_norm(y.double(), (case.n,), w.double(), b.double(), EPS)
    if case.keeps:
        error = (got[0].double() - exact).abs()
        finite = exact.isfinite()
        assert torch.equal(got[0].isfinite(), finite)
        assert (error <= layer_norm_bound(y, w, b, EPS))[finite].all(), case
        if case.quantizer == "fixed":
            assert torch.equal(got[1], quantize(got[0], *given[-1]["fixed"]))
        elif case.quantizer == "per_token":
            want = quantize_per_token(got[0], given[-1]["multiplier"])
            assert torch.equal(got[1], want[0]) and same_bits(got[2], want[1])
        return [got[0]]
    # Codes alone: a value within the bound of a boundary may fall on either side.
    codes, scales_ = got
    step = scales_.double()
    back = (codes.double() - 128) * step / given[-1]["multiplier"].double()
    slack = layer_norm_bound(y, w, b, EPS) + (step * 0.5001) / given[-1]["multiplier"].double()
    assert ((back - exact).abs() <= slack).all()
    return []


@pytest.mark.parametrize("read", [(0,), (1,), (2,), (0, 2)])
def test_outputs_that_nobody_reads_are_not_written(read: tuple[int, ...]) -> None:
    case = CASES[7]
    function = torch.compile(
        lambda *given: [ops.qlinear_rows(*case.arguments(*given))[i] for i in read],
        backend="qsim",
        dynamic=False,
    )
    given = case.inputs(30)
    everything = torch.compile(
        lambda *given: ops.qlinear_rows(*case.arguments(*given)), backend="qsim", dynamic=False
    )(*given)
    for index, got in zip(read, function(*given), strict=True):
        assert same_bits(got, everything[index])


def test_functions_of_the_vector_library_with_shorter_vectors() -> None:
    """Inductor told to use 256-bit vectors: our kernels keep their own, without its library."""
    x, w = _codes(9, 64), _weight(64, 64, 1)
    for activation in ("tanh", "silu"):
        run = torch.compile(
            lambda x, name=activation: ops.qlinear(
                x, STATIC["x_scale"], STATIC["x_zero_point"], *w, None, name
            ),
            backend="qsim",
            options={"inductor": {"cpp.simdlen": 256}},
        )
        want = qlinear(x, STATIC["x_scale"], STATIC["x_zero_point"], *w, None, activation)
        assert (run(x) - want).abs().max() <= 4e-6


def test_result_does_not_depend_on_the_number_of_threads() -> None:
    case = CASES[7]
    run = torch.compile(
        lambda *given: ops.qlinear_rows(*case.arguments(*given)), backend="qsim", dynamic=False
    )
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(*case.inputs(100)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


def test_operators_are_registered_well_and_refuse_what_they_cannot_do() -> None:
    merged, rows = CASES[0], CASES[8]
    # without a NaN, which equals nothing
    for op, case in ((ops.qlinear_merged.default, merged), (ops.qlinear_rows.default, CASES[4])):
        torch.library.opcheck(op, case.arguments(*case.inputs(3)))
    lists = [list(given) for given in merged.lists]
    lists[1][2] = lists[1][2][:32]
    x, *_ = merged.inputs(3)
    with pytest.raises(ConfigError, match=r"\[64, 64, 32\] outputs"):
        ops.qlinear_merged(x, STATIC["x_scale"], STATIC["x_zero_point"], *lists)
    for position, wrong, message in (
        (9, torch.ones(5), r"norm_weight is torch.float32 of shape \(5,\)"),
        (10, None, "needed together"),
        (13, "nearest", ", ".join(QUANTIZERS)),
        (16, torch.ones(1, 130), r"multiplier is torch.float32 of shape \(1, 130\)"),
    ):
        arguments = list(rows.arguments(*rows.inputs(3)))
        arguments[position] = wrong
        with pytest.raises(ConfigError, match=message):
            ops.qlinear_rows(*arguments)
