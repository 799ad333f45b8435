"""Quantizer, describe(), compare(), and the form without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from qinductor.numerics import (
    E4M3,
    E5M2,
    E8M0,
    NAMED,
    Quantizer,
    Rounding,
    assign_sites,
    compare,
    describe,
    quantize,
    set_step,
)

SR = Rounding.STOCHASTIC


def test_forward_and_backward_are_independent():
    q = Quantizer(E4M3, E5M2, Rounding.UPWARD, Rounding.DOWNWARD)
    x = torch.randn(50, requires_grad=True)
    y = q(x)
    assert torch.equal(y, quantize(x.detach(), E4M3, Rounding.UPWARD))
    g = torch.randn(50)
    y.backward(g)
    assert torch.equal(x.grad, quantize(g, E5M2, Rounding.DOWNWARD))
    only = Quantizer(None, E5M2)
    z = torch.randn(9, requires_grad=True)
    out = only(z)
    assert torch.equal(out, z)
    out.backward(torch.full((9,), 1.1))
    assert torch.equal(z.grad, quantize(torch.full((9,), 1.1), E5M2))


def test_the_mask_comes_before_the_rounding_of_the_gradient():
    q = Quantizer(E4M3, E4M3, backward_rounding=Rounding.UPWARD, backward="mask")
    x = torch.tensor([500.0, 1.0], requires_grad=True)
    q(x).backward(torch.tensor([1.1, 1.1]))
    assert x.grad.tolist() == [0, 1.125]


def test_steps_sites_and_resume():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(8, 8),
            Quantizer(E4M3, None, SR),
            nn.Linear(8, 8),
            Quantizer(E4M3, E5M2, SR, SR),
        )

    x = torch.randn(16, 8)
    a, b = make(), make()
    assert set(assign_sites(a)) == {"1", "3"}
    assign_sites(b)
    first = a(x)
    assert torch.equal(a(x), first)
    set_step(a, 5)
    assert not torch.equal(a(x), first)
    b.load_state_dict(a.state_dict())
    assert torch.equal(a(x), b(x))
    compiled = torch.compile(a, fullgraph=True, backend="aot_eager")
    loss, want = compiled(x).sum(), a(x).sum()
    assert torch.equal(loss, want)
    loss.backward()
    got = [p.grad.clone() for p in a.parameters()]
    a.zero_grad()
    want.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(a.parameters(), got, strict=True))


def test_data_parallel_ranks_round_apart():
    model = nn.Sequential(Quantizer(E4M3, E5M2, SR, SR), Quantizer(E4M3, None, SR))
    sites = [assign_sites(model, rank) for rank in (None, 0, 1, 2)]
    assert sites[0] == sites[1], "one process is rank 0"
    every = {site for ranked in sites[1:] for pair in ranked.values() for site in pair}
    assert len(every) == 3 * 4
    x, results = torch.randn(500), []
    for rank in (0, 1, 1):
        assign_sites(model, rank)
        results.append(model(x))
    assert torch.equal(results[1], results[2])
    assert not torch.equal(results[0], results[1])


def test_bad_quantizers():
    with pytest.raises(ValueError, match="or both"):
        Quantizer(None)
    with pytest.raises(ValueError, match="E8M0"):
        Quantizer(E4M3, E8M0)


def test_describe_and_compare(tmp_path):
    for name in NAMED:
        assert name in describe(name)
    assert "448" in describe("E4M3")
    c = compare(torch.randn(1000), ["E4M3", "MXFP4"])
    lines = str(c).splitlines()
    assert len(lines) == 3 and lines[1].startswith("E4M3") and lines[2].startswith("MXFP4")
    assert c.stats[0].sqnr_db > c.stats[1].sqnr_db
    pytest.importorskip("matplotlib")
    c.plot(tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="at least one"):
        compare(torch.ones(2), [])


def test_without_a_compiler_one_warning_and_the_same_numbers(tmp_path):
    code = """
import torch, warnings
from qinductor.numerics import Rounding, quantize
x = torch.linspace(-9, 9, 1000)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    q = [quantize(x, f, m, seed=1) for f in ("E4M3", "MXFP4") for m in
         (Rounding.TIES_TO_EVEN, Rounding.STOCHASTIC)]
mine = [w for w in seen if "compiler" in str(w.message)]
assert len(mine) == 1, seen
torch.save(q, "q.pt")
"""
    env = {**os.environ, "CXX": "/no/such/compiler", "QINDUCTOR_CACHE_DIR": str(tmp_path / "c")}
    env["PYTHONPATH"] = os.pathsep.join([os.getcwd(), env.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=env)
    x = torch.linspace(-9, 9, 1000)
    want = [
        quantize(x, f, m, seed=1) for f in ("E4M3", "MXFP4") for m in (Rounding.TIES_TO_EVEN, SR)
    ]
    assert all(torch.equal(a, b) for a, b in zip(torch.load(tmp_path / "q.pt"), want, strict=True))
