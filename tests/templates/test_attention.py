"""The attention kernel against its eager body and against exact attention."""

from __future__ import annotations

import pytest
import torch
from tolerances import BF16_STEP, attention_bound
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import qinductor.attention
from qinductor.backend import qsim
from qinductor.capability import Capability
from qinductor.errors import BackwardThroughInt8Error, ConfigError

attention = torch.ops.qinductor.attention
needs_bf16 = pytest.mark.skipif(
    not Capability.detect().avx512_bf16, reason="this CPU lacks avx512_bf16"
)

# (B, Sq, Sk, H, D, mask shape or None, causal): remainders of every loop of the kernel.
SHAPES = [
    (2, 7, 7, 3, 32, None, False),
    (2, 130, 130, 2, 64, (2, 1, 130, 130), False),
    (1, 5, 70, 2, 80, (1, 1, 5, 70), False),
    (3, 33, 33, 4, 16, (3, 1, 1, 33), False),
    (2, 40, 40, 2, 128, None, True),
    (1, 1, 1, 1, 6, None, False),
    (2, 64, 64, 2, 144, (1, 2, 1, 64), False),
    (1, 600, 600, 1, 64, (600, 600), True),
]


def _inputs(shape: tuple) -> tuple[list[Tensor], Tensor | None]:
    b, sq, sk, h, d, mask_shape, _ = shape
    generator = torch.Generator().manual_seed(sq * sk + d)
    qkv = [torch.randn(b, s, h * d, generator=generator).bfloat16() for s in (sq, sk, sk)]
    if mask_shape is None:
        return qkv, None
    mask = torch.randn(mask_shape, generator=generator)
    return qkv, mask.masked_fill(torch.rand(mask_shape, generator=generator) < 0.3, -torch.inf)


def _exact(qkv: list[Tensor], mask: Tensor | None, heads: int, causal: bool) -> Tensor:
    """Attention in float64, rows without a visible key as zeros."""
    b, sq, width = qkv[0].shape
    q, k, v = (t.double().view(b, -1, heads, width // heads).transpose(1, 2) for t in qkv)
    scores = q @ k.transpose(-1, -2) * (width // heads) ** -0.5
    if mask is not None:
        scores = scores + mask.double()
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2).reshape(b, sq, width)


@needs_bf16
def test_kernel_agrees_with_the_eager_body_and_with_exact_attention() -> None:
    """All shapes in one compiled function: one compilation."""
    cases = [(*_inputs(shape), shape) for shape in SHAPES]

    def run(cases: list) -> list[Tensor]:
        return [
            attention(*qkv, shape[3], shape[4] ** -0.5, mask, shape[6])
            for qkv, mask, shape in cases
        ]

    compiled, (code, *_) = run_and_get_code(torch.compile(run, backend=qsim, dynamic=False), cases)
    assert code.count("Avx512Bf16Attention::run") == len(SHAPES)
    for got, want, (qkv, mask, shape) in zip(compiled, run(cases), cases, strict=True):
        exact = _exact(qkv, mask, shape[3], shape[6])
        bound = attention_bound(qkv[2])
        assert (got.double() - exact).abs().max() <= bound, shape
        assert (want.double() - exact).abs().max() <= bound, shape
        assert (got - want).abs().max() <= bound, shape


@needs_bf16
def test_requantized_output_is_within_one_code_and_dynamic_sizes_share_a_graph() -> None:
    scale, zero_point = torch.tensor(37.0), torch.tensor(120, dtype=torch.int32)
    channel = torch.linspace(20, 60, 64)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        args = (q, k, v, 2, 32**-0.5, None, False, torch.uint8)
        return attention(*args, scale, zero_point), attention(*args, channel, zero_point)

    compiled = torch.compile(run, backend=qsim, dynamic=True)
    for length in (9, 64, 77):
        qkv = [torch.randn(3, length, 64).bfloat16() for _ in range(3)]
        for got, want in zip(compiled(*qkv), run(*qkv), strict=True):
            assert (got.int() - want.int()).abs().max() <= 1


@needs_bf16
def test_result_does_not_depend_on_the_number_of_threads_nor_on_the_batch() -> None:
    qkv = [torch.randn(4, 50, 96).bfloat16() for _ in range(3)]
    run = torch.compile(lambda q, k, v: attention(q, k, v, 3, 0.2), backend=qsim, dynamic=True)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(run(*qkv))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])
    alone = torch.cat([run(*(t[i : i + 1] for t in qkv)) for i in range(4)])
    assert torch.equal(results[0], alone)


@needs_bf16
def test_masked_keys_have_no_influence_and_nan_stays_in_its_rows() -> None:
    qkv = [torch.randn(1, 70, 32).bfloat16() for _ in range(3)]
    mask = torch.zeros(1, 1, 1, 70)
    mask[..., 41:] = -torch.inf
    run = torch.compile(lambda q, k, v, m: attention(q, k, v, 1, 0.2, m), backend=qsim)
    expected = run(*qkv, mask)
    for t in qkv[1:]:
        t[:, 41:] = 1000.0
    assert torch.equal(run(*qkv, mask), expected)
    assert torch.equal(run(*qkv, torch.full_like(mask, -torch.inf)), torch.zeros(1, 70, 32))
    qkv[0][:, 3] = torch.nan
    poisoned = run(*qkv, mask)
    assert poisoned[:, 3].isnan().all()
    rest = torch.arange(70) != 3
    assert torch.equal(poisoned[:, rest], expected[:, rest])


@needs_bf16
def test_a_row_masked_by_the_least_number_averages() -> None:
    """Models mask with finfo.min as well as with -inf; only -inf hides a key from such a row."""
    q, k, v = (torch.randn(1, 37, 32).bfloat16() for _ in range(3))
    mask = torch.zeros(1, 1, 37, 37)
    mask[..., 3, :] = torch.finfo(torch.float32).min
    mask[..., 4, :20] = torch.finfo(torch.float32).min
    run = torch.compile(lambda q, k, v, m: attention(q, k, v, 1, 0.2, m), backend=qsim)
    got, want = run(q, k, v, mask), attention(q, k, v, 1, 0.2, mask)
    assert (got - want).abs().max() <= attention_bound(v)
    assert (got[0, 3] - v[0].float().mean(dim=0)).abs().max() <= attention_bound(v)


@needs_bf16
def test_heads_that_the_kernel_lacks_run_the_eager_operator() -> None:
    q, k, v = (torch.randn(2, 5, 3 * 7).bfloat16() for _ in range(3))
    run = torch.compile(lambda *qkv: attention(*qkv, 3, 0.2), backend=qsim)
    got, (code, *_) = run_and_get_code(run, q, k, v)
    assert "Avx512Bf16Attention" not in code
    assert torch.equal(got, attention(q, k, v, 3, 0.2))


def test_keys_and_values_of_another_shape_are_refused() -> None:
    q, k, v = (torch.randn(2, 5, 64).bfloat16() for _ in range(3))
    with pytest.raises(ConfigError, match=r"v has shape \(2, 5, 32\); it has to be \(2, 5, 64\)"):
        attention(q, k, v[..., :32], 2, 0.2)
    with pytest.raises(ConfigError, match=r"k has shape \(1, 5, 64\)"):
        attention(q, k[:1], v, 2, 0.2)


def test_operator_is_registered_well_and_refuses_what_it_cannot_do() -> None:
    q, k, v = (torch.randn(2, 5, 8).bfloat16() for _ in range(3))
    torch.library.opcheck(attention.default, (q, k, v, 2, 0.5))
    with pytest.raises(ConfigError, match="bfloat16"):
        attention(q.float(), k, v, 2, 0.5)
    with pytest.raises(ConfigError, match="heads=3"):
        attention(q, k, v, 3, 0.5)
    with pytest.raises(ConfigError, match="float64"):
        attention(q, k, v, 2, 0.5, out_dtype=torch.float64)
    with pytest.raises(BackwardThroughInt8Error, match="qinductor::attention"):
        attention(q.requires_grad_(), k, v, 2, 0.5).sum().backward()


def test_eager_body_rounds_as_it_says() -> None:
    """With one key the only probability is 1: the value comes out as it is."""
    q, k, v = (torch.randn(2, s, 6).bfloat16() for s in (4, 1, 1))
    assert torch.equal(attention(q, k, v, 3, 1.0), v.float().expand(2, 4, 6))
    assert torch.finfo(torch.bfloat16).eps == BF16_STEP
    assert qinductor.attention.__doc__ and "all masked gives zeros" in qinductor.attention.__doc__
