"""torch.compile(model, backend="qsim", options={"simulate": spec}): the same numbers as eager."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import sim_nets as nets
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import qinductor
from qinductor import ConfigError, Rule, SimulationSpec, simulate


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def images(n, size=4):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(size, 3, 6, 6, generator=generator) for _ in range(n)]


def test_losses_and_gradients_are_eagers_and_it_compiles_once():
    torch.manual_seed(0)
    model, twin = nets.ConvNet(), nets.ConvNet()
    twin.load_state_dict(model.state_dict())
    data = images(6)
    handle = simulate(model, nets.stochastic())
    with handle:
        want = nets.train(model, model, data)
    spec = nets.stochastic()
    compiled = torch.compile(twin, backend="qsim", options={"simulate": spec}, fullgraph=True)
    first = nets.train(twin, compiled, data[:1])
    with torch._dynamo.config.patch(error_on_recompile=True):
        losses, grads = nets.train(twin, compiled, data[1:])
    assert nets.same(([*first[0], *losses], grads), want)

    simulation = qinductor.simulation.simulation_of(compiled)
    assert simulation.state_dict()["step"] == handle.state_dict()["step"] == 6
    assert simulation.sites_by_number() == handle.sites_by_number()

    report = qinductor.explain(compiled)
    assert report.counts() == {"total": 1, "int8": 0, "simulated": 1, "kept": 0}
    assert "linear: input E4M3 STOCHASTIC" in report.linears[0].detail
    sites = {row["site"] for row in report.to_dict()["simulated"]}
    assert sites == {"first", "second", "head", "(model)"}
    assert "add: input E4M3 STOCHASTIC" in str(report)

    # Resume: the handle's state goes over to the other execution.
    resumed = simulate(twin, spec)
    resumed.load_state_dict(simulation.state_dict())
    x = images(1)[0]
    copied = copy.deepcopy(twin)
    with resumed:
        eager = nets.train(twin, twin, [x])
    twin.load_state_dict(copied.state_dict())
    assert nets.same(nets.train(twin, compiled, [x]), eager)


def test_attention_stays_within_what_inductor_changes():
    torch.manual_seed(0)
    model = nets.Attention()
    tokens = torch.randint(0, 11, (2, 7))
    exact = "FloatingPoint(8, 23)"
    ops = ("linear", "sdpa_qk", "sdpa_pv")
    spec = SimulationSpec(Rule(op=ops, input="E4M3", weight=exact, output="BF16"), seed=0)
    with simulate(model, spec) as handle:
        want = model(tokens)
    compiled = torch.compile(model, backend="qsim", options={"simulate": handle}, fullgraph=True)
    got = compiled(tokens)
    # K = 16 terms of fp32; a rounding to BF16 may go the other way where they differ.
    assert torch.allclose(got, want, rtol=2**-7, atol=2**-7)
    got.sum().backward()
    assert model.mha.in_proj_weight.grad.isfinite().all()


@pytest.mark.parametrize("net", [nets.Attention, nets.Blocks, nets.ConvNet])
def test_a_rewritten_graph_alone_is_eager(net):
    """Before Inductor there is no difference at all, attention included."""
    torch.manual_seed(0)
    model = net()
    x = {
        nets.Attention: torch.randint(0, 11, (2, 7)),
        nets.Blocks: torch.randn(4, 16),
        nets.ConvNet: images(1)[0],
    }[net]
    eager, graph = simulate(model, nets.stochastic()), simulate(model, nets.stochastic())
    with eager:
        want = nets.train(model, model, [x, x], lr=0)
    assert nets.same(nets.train(model, nets.rewritten(model, graph), [x, x], lr=0), want)
    assert eager.sites_by_number() == graph.sites_by_number()


def test_checkpoints_are_rewritten_inside():
    results = []
    for mode in ("plain", "checkpoint"):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = nets.Blocks(mode)
        handle = simulate(model, nets.stochastic())
        # Through AOTAutograd's partitioner, which is what recomputes.
        compiled = nets.rewritten(model, handle, "aot_eager_decomp_partition", fullgraph=True)
        results.append(nets.train(model, compiled, [torch.ones(4, 16), torch.ones(4, 16)]))
    assert nets.same(*results)
    with simulate(model := nets.Blocks(), nets.stochastic()):
        torch.manual_seed(0)
        model.load_state_dict(nets.Blocks().state_dict())
        assert nets.same(nets.train(model, model, [torch.ones(4, 16)] * 2), results[0])


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        x = x + self.fc(x)
        torch._dynamo.graph_break()
        return x + self.fc(x)


def test_graph_breaks_go_on_counting():
    torch.manual_seed(0)
    model, x = Broken(), torch.randn(4, 16)
    eager, graphs = simulate(model, nets.stochastic()), simulate(model, nets.stochastic())
    with eager:
        want = nets.train(model, model, [x] * 3)
    model = Broken()
    torch.manual_seed(0)
    model.load_state_dict(Broken().state_dict())
    assert nets.same(nets.train(model, nets.rewritten(model, graphs), [x] * 3), want)
    assert int(graphs.step) == 3
    assert eager.sites_by_number() == graphs.sites_by_number()
    assert {s.call for s in graphs.sites if s.op == "add"} == {0, 1}


def test_other_shapes_recompile_and_count_on():
    torch.manual_seed(0)
    model = nets.Blocks()
    data = [torch.randn(n, 16) for n in (4, 5, 4, 6)]
    eager, graphs = simulate(model, nets.stochastic()), simulate(model, nets.stochastic())
    with eager:
        want = nets.train(model, model, data, lr=0)
    assert nets.same(
        nets.train(model, nets.rewritten(model, graphs, dynamic=False), data, lr=0), want
    )


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule("haed", input="E4M3"), "no module is named like 'haed'. Nearest: 'head'"),
        (Rule("head", op="conv2d", input="E4M3"), "no conv2d ran.*Nearest: 'linear'"),
    ],
)
def test_a_rule_that_matches_nothing_is_an_error(rule, message):
    model = nets.ConvNet()
    compiled = torch.compile(model, backend="qsim", options={"simulate": SimulationSpec(rule)})
    with pytest.raises(BackendCompilerFailed, match=message):
        compiled(images(1)[0])


def test_the_option_is_checked():
    compiled = torch.compile(nn.Linear(2, 2), backend="qsim", options={"simulate": "fp8"})
    with pytest.raises(BackendCompilerFailed, match="simulate='fp8' is no spec"):
        compiled(torch.ones(1, 2))


def test_stock_inductor_cannot_simulate():
    with pytest.raises(ConfigError, match=r"backend='qsim'"):
        qinductor.inductor_options(simulate=nets.stochastic())


def test_a_compiled_model_in_the_block_is_refused():
    model, x = nets.Blocks(), torch.randn(4, 16)
    compiled = torch.compile(model, backend="eager")
    message = r"simulated was compiled.*options="
    with simulate(model, nets.stochastic()) as handle, pytest.raises(ConfigError, match=message):
        compiled(x)
    assert handle.position is None
    assert torch.equal(compiled(x), model(x))


def test_a_graph_from_the_cache_finds_its_operators():
    """A process that finds a stochastic graph compiled lowers nothing, and needs them all."""
    code = "import torch, qinductor.numerics as n; torch.ops.qinductor.random_bits.default"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
