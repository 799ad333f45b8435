from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qinductor.smoothquant.observers import (
    SAMPLE_ROWS,
    LinearObserver,
    RowSample,
    real_rows,
)

K = 8


def _observed(*batches: tuple[torch.Tensor, torch.Tensor | None]) -> LinearObserver:
    observer = LinearObserver(sample=True)
    for x, mask in batches:
        assert observer.observe(real_rows(x, mask))
    return observer


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_batching_changes_nothing(sizes: list[int], seed: int) -> None:
    x = torch.randn(sum(sizes), K, generator=torch.Generator().manual_seed(seed))
    whole = _observed((x, None))
    parts = _observed(*((part, None) for part in x.split(sizes)))
    assert torch.equal(whole.low, x.amin(0)) and torch.equal(whole.high, x.amax(0))
    assert torch.equal(whole.low, parts.low) and torch.equal(whole.high, parts.high)
    assert torch.equal(whole.sample.data, parts.sample.data)


@pytest.mark.parametrize("layout", ["grid", "flat", "transposed", "heads"])
def test_padding_moves_no_statistic_whatever_it_holds(layout: str) -> None:
    x = torch.randn(2, 5, K)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], dtype=torch.bool)
    padded = torch.where(mask[..., None], x, torch.tensor(float("nan")))
    mask_of_x = mask
    if layout == "flat":
        padded = padded.reshape(-1, K)
    elif layout == "transposed":
        padded = padded.transpose(0, 1)
    elif layout == "heads":
        padded = padded.view(2, 5, 2, K // 2)
        expected = x[mask].view(-1, K // 2)
    if layout != "heads":
        expected = x[mask]
    seen = _observed((padded, mask_of_x))
    assert torch.equal(seen.low, expected.amin(0)) and torch.equal(seen.high, expected.amax(0))
    assert seen.rows == expected.shape[0]


def test_more_padding_gives_the_same_bits() -> None:
    x = torch.randn(3, 4, K)
    mask = torch.ones(3, 4, dtype=torch.bool)
    wide = torch.cat([x, 1e6 * torch.randn(3, 9, K)], dim=1)
    wide_mask = torch.cat([mask, torch.zeros(3, 9, dtype=torch.bool)], dim=1)
    a, b = _observed((x, mask)), _observed((wide, wide_mask))
    assert torch.equal(a.low, b.low) and torch.equal(a.high, b.high)
    assert torch.equal(a.sample.data, b.sample.data)


def test_rows_that_are_no_tokens_all_count() -> None:
    mask = torch.tensor([[1, 0, 0], [1, 1, 0]], dtype=torch.bool)
    assert real_rows(torch.randn(2, K), mask).shape == (2, K)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_refuses_what_is_not_finite_and_keeps_its_state(bad: float) -> None:
    observer = _observed((torch.ones(2, K), None))
    x = torch.full((3, K), 5.0)
    x[1, 2] = bad
    assert not observer.observe(x)
    assert observer.rows == 2 and float(observer.high.max()) == 1.0


def test_an_empty_batch_is_no_batch() -> None:
    observer = LinearObserver(sample=False)
    assert observer.observe(torch.empty(0, K))
    assert observer.rows == 0 and observer.low is None


def test_memory_does_not_grow() -> None:
    sample = RowSample()
    for _ in range(20):
        sample.add(torch.randn(100, K))
    assert sample.seen == 2000
    assert sample.data.shape == (SAMPLE_ROWS, K)


def test_the_sample_is_uniform() -> None:
    """Every one of 20,000 rows stays with chance 512/20,000: a chi-square over 20 blocks."""
    sample = RowSample()
    for part in torch.arange(20_000.0)[:, None].split(700):
        sample.add(part)
    counts = torch.histc(sample.data.flatten(), bins=20, min=0, max=20_000)
    expected = SAMPLE_ROWS / 20
    # 99.99 % quantile of chi-square with 19 degrees of freedom: 50.8. The sample is deterministic.
    assert float(((counts - expected) ** 2 / expected).sum()) < 50.8
    assert sample.data.unique().numel() == SAMPLE_ROWS
