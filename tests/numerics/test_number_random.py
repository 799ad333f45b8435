"""Random bits and stochastic rounding."""

from __future__ import annotations

import math

import grid_oracle as go
import pytest
import torch

from qinductor.numerics import (
    MX,
    NAMED,
    BlockFloatingPoint,
    FixedPoint,
    FloatingPoint,
    Posit,
    Rounding,
    Table,
    quantize,
    quantize_,
    site_hash,
)
from qinductor.numerics.random_bits import philox4x32, random_integers

SR = Rounding.STOCHASTIC
FREQUENCIES = [
    NAMED["E4M3"],
    FixedPoint(8, 4),
    Posit(8, 2),
    Table((0.0, 0.3, 9.0)),
    BlockFloatingPoint(6),
    MX(NAMED["E2M1"]),
    NAMED["NVFP4_E2M1"],
]
# kat_vectors of Random123 1.14.0, philox4x32 10: counter, key, result.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "result"), VECTORS)
def test_random123_vectors(counter, key, result):
    def words(text):
        return tuple(torch.tensor(int(w, 16)) for w in text.split())

    assert [int(w) for w in philox4x32(words(counter), words(key))] == [
        int(w, 16) for w in result.split()
    ]


def scalar_philox(counter, key):
    c, k = list(counter), list(key)
    for i in range(10):
        if i:
            k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [p1 >> 32 ^ c[1] ^ k[0], p1 % 2**32, p0 >> 32 ^ c[3] ^ k[1], p0 % 2**32]
    return c


@pytest.mark.parametrize("r", [1, 5, 8, 9, 16, 17, 31, 32])
def test_counter_mapping(r):
    b = 8 if r <= 8 else 16 if r <= 16 else 32
    n = 128 // b
    seed, site, step, offset = -(2**40) - 5, 0xDEADBEEF, 2**32 + 9, 2**37 + 3
    got = random_integers(
        700, r, torch.tensor(seed), torch.tensor(step), site=site, index_offset=offset
    ).tolist()
    for j in (0, 1, 15, 16, 17, 100, 300, 699):
        i = offset + j
        g, w, lane = i // (16 * n), i // 16 % n, i % 16
        block = 16 * g + lane
        out = scalar_philox(
            (block % 2**32, block >> 32, site, step % 2**32),
            (seed % 2**32, (seed >> 32) % 2**32),
        )
        piece = out[w * b // 32] >> (w * b % 32) & (2**b - 1)
        assert got[j] == piece >> (b - r), j


@pytest.mark.parametrize("r", [1, 8, 13, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_same_bits_whatever_the_layout_and_threads(r, dtype):
    x = (torch.randn(67, 131) * 3).to(dtype)
    want = quantize(x, "E4M3", SR, seed=1, site=2, step=3, random_bits=r)
    forms = [x.t().contiguous().t(), x.repeat_interleave(2, 1)[:, ::2]]
    for form in forms:
        got = quantize(form, "E4M3", SR, seed=1, site=2, step=3, random_bits=r)
        assert torch.equal(got, want)
        assert got.stride() == torch.empty_like(form).stride()
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            again = quantize(x, "E4M3", SR, seed=1, site=2, step=3, random_bits=r)
            assert torch.equal(again, want)
    finally:
        torch.set_num_threads(threads)
    cut = quantize(x[30:], "E4M3", SR, seed=1, site=2, step=3, random_bits=r, index_offset=30 * 131)
    assert torch.equal(cut, want[30:])
    place = x.clone()
    assert quantize_(place, "E4M3", SR, seed=1, site=2, step=3, random_bits=r) is place
    assert torch.equal(place, want)


def test_a_large_index_offset_crosses_the_words_boundary():
    x = torch.rand(5000)
    start = 2**32 * 4 - 2000
    whole = quantize(x, "E2M1", SR, seed=9, index_offset=start)
    parts = [
        quantize(x[i : i + 1000].clone(), "E2M1", SR, seed=9, index_offset=start + i)
        for i in range(0, 5000, 1000)
    ]
    assert torch.equal(whole, torch.cat(parts))


def test_seed_step_site_and_none():
    x = torch.rand(1000) + 1
    base = quantize(x, "E2M1", SR, seed=1)
    assert torch.equal(base, quantize(x, "E2M1", SR, seed=torch.tensor(1), step=torch.tensor(0)))
    for other in ({"seed": 2}, {"seed": 1, "step": 1}, {"seed": 1, "site": 1}):
        assert not torch.equal(base, quantize(x, "E2M1", SR, **other))
    torch.manual_seed(3)
    first = [quantize(x, "E2M1", SR) for _ in range(2)]
    torch.manual_seed(3)
    again = [quantize(x, "E2M1", SR) for _ in range(2)]
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])
    assert torch.equal(quantize(x, "E2M1", SR, seed=2**64 - 1), quantize(x, "E2M1", SR, seed=-1))
    assert site_hash("layer.0", "linear", "input", 1) != site_hash("layer.0", "linear", "input", 2)
    assert 0 <= site_hash("a") < 2**32


@pytest.mark.parametrize("fmt", FREQUENCIES, ids=str)
@pytest.mark.parametrize("r", [4, 8, 32])
def test_frequencies_within_five_sigma(fmt, r):
    n = 48_000
    for k, value in enumerate((0.27, 0.913, 5.3)):
        x = torch.full((n,), value)
        # The block's scale is set by the first element, and stays out of the statistics.
        x[::16] = 6.0
        low, high = (quantize(x, fmt, m)[1].item() for m in (Rounding.TOWARD_ZERO, SR))
        q = quantize(x, fmt, SR, seed=17 + k, random_bits=r)
        q = q.view(-1, 16)[:, 1:].flatten()
        values = q.unique()
        assert len(values) <= 2 and low in [*values.tolist(), high]
        high = max(v for v in [*values.tolist(), high])
        if len(values) < 2:
            continue
        f = (float(x[1]) - low) / (high - low)
        p = math.floor(f * 2**r) / 2**r
        sigma = math.sqrt(len(q) * p * (1 - p))
        assert abs(float((q == high).sum()) - len(q) * p) <= 5 * sigma + 1e-6 * len(q)


@pytest.mark.parametrize("name", [n for n, f in NAMED.items() if isinstance(f, FloatingPoint)])
def test_a_grid_point_never_moves(name):
    x = go.near_range(NAMED[name], 20_000, 8)
    q = quantize(x, name, SR, seed=1)
    assert not len(go.same(quantize(q, name, SR, seed=2), q.double().numpy()))


def test_every_u_is_reached():
    for r in (1, 3, 8):
        u = random_integers(4000 * 2**r // 16, r, torch.tensor(0), torch.tensor(0))
        assert sorted(u.unique().tolist()) == list(range(2**r))
