"""observe(): counts per site, the table, JSON, PNG, and the first trouble by name."""

from __future__ import annotations

import json
import warnings

import pytest
import sim_nets as nets
import torch
from torch import nn

from qinductor import ConfigError, Rule, SimulationSpec, observe, quantize, simulate
from qinductor.numerics import E2M1, E4M3
from qinductor.numerics.quantize import statistics


def layer():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8, bias=False))


SPEC = SimulationSpec(Rule(op="linear", input="E2M1", grad_output="E4M3"))


def test_counts_are_those_of_the_tensors():
    model, x = layer(), torch.randn(4, 16) * 4
    x[0, 0], x[1, 1] = torch.inf, 0.1
    g = torch.randn(4, 8) * 1e-3
    with simulate(model, SPEC), observe(model) as seen:
        for _ in range(2):
            model(x.nan_to_num(posinf=torch.inf)).backward(g)
    by_role = {site.role: s for site, s in seen.stats.items()}
    want = statistics(x, quantize(x, E2M1), E2M1)
    got = by_role["input"]
    assert got.tensors == 2 and got.elements == 2 * want.elements
    assert got.saturated == 2 * want.saturated > 0 and got.inf == 2
    assert got.underflowed == 2 * want.underflowed > 0
    assert got.sqnr_db == pytest.approx(want.sqnr_db)
    exponents = torch.floor(torch.log2(x.abs()[torch.isfinite(x)])).long()
    want_bins = torch.bincount(exponents + 160, minlength=321) * 2
    assert torch.equal(got.exponents, want_bins)
    grads = statistics(g, quantize(g, E4M3), E4M3)
    assert by_role["grad_output"].underflowed == 2 * grads.underflowed > 0


def test_a_table_json_and_a_chart(tmp_path):
    torch.manual_seed(0)
    model = nets.ConvNet()
    handle = simulate(model, nets.stochastic())
    with handle, observe(handle, every=2) as seen:
        for _ in range(4):
            model(torch.randn(2, 3, 6, 6) * 1000).sum().backward()
    assert {s.tensors for s in seen.stats.values()} == {2}
    table = str(seen)
    lines = [line for line in table.splitlines() if "#" in line]
    assert len(lines) == len(seen.stats) > 20
    assert "first: conv2d input" in lines[0]  # 1000·N(0, 1) does not fit 448
    seen.save(tmp_path / "seen.json")
    data = json.loads((tmp_path / "seen.json").read_text())
    assert data["sites"][0]["site"] == "first: conv2d input #0" and data["first_nan"] is None
    pytest.importorskip("matplotlib")
    seen.plot(tmp_path / "seen.png")
    assert (tmp_path / "seen.png").read_bytes().startswith(b"\x89PNG")


def test_the_first_nan_and_the_first_zero_gradient_are_named():
    model, x = layer(), torch.randn(4, 16)
    with simulate(model, SPEC), observe(model) as seen:
        model(x).backward(torch.ones(4, 8))
        with pytest.warns(RuntimeWarning, match="gradient at 0: linear grad_output #0 became all"):
            model(x).backward(torch.full((4, 8), 1e-9))
        x[1, 1] = torch.nan
        with pytest.warns(RuntimeWarning, match="first NaN is in 0: linear input #0, at step 2"):
            model(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x)  # said once
    assert seen.first_nan[1] == 2 and seen.first_zero_gradient[1] == 1
    assert "first all-zero gradient: 0: linear grad_output #0, step 1" in str(seen)


def test_it_costs_nothing_when_off_and_changes_nothing_when_on():
    torch.manual_seed(0)
    model = nets.Blocks()
    handle = simulate(model, nets.stochastic())
    with handle:
        want = nets.train(model, model, [torch.ones(2, 16)], lr=0)
    again = simulate(model, nets.stochastic())
    with again, observe(model):
        assert nets.same(nets.train(model, model, [torch.ones(2, 16)], lr=0), want)
    assert not again.watchers
    calls = []
    again.watchers = Spy(calls)
    with again:
        model(torch.ones(2, 16))
    assert calls == ["bool"] * len(calls)  # asked whether there are any, and nothing more


class Spy(list):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __bool__(self):
        self.calls.append("bool")
        return False

    def __iter__(self):
        self.calls.append("iter")
        return super().__iter__()


def test_what_is_not_simulated_is_refused():
    with pytest.raises(ConfigError, match=r"simulate\(model, spec\) first"):
        observe(layer())
    model = layer()
    handle = simulate(model, SPEC)
    with pytest.raises(ConfigError, match="every=0"):
        observe(handle, every=0)
