"""with qinductor.simulate(model, spec): what it computes, and what it leaves alone."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sim_nets as nets
import torch
import torch.nn.functional as F
from torch import nn

from qinductor import ConfigError, Precision, Rounding, Rule, SimulationSpec, quantize, simulate
from qinductor.numerics import site_hash

SR = Rounding.STOCHASTIC


def one(op="linear", seed=5, **roles):
    return SimulationSpec(Rule(op=op, **roles), seed=seed)


def batches(n=3, shape=(4, 16)):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for _ in range(n)]


def test_each_role_is_rounded_where_it_says():
    torch.manual_seed(0)
    layer = nn.Linear(16, 8)
    x, g = torch.randn(4, 16, requires_grad=True), torch.randn(4, 8)
    spec = one(
        input="E4M3", weight="E2M3", bias="E3M2", output="E5M2",
        grad_output="E3M4", grad_input="E2M1", grad_weight="FP16",
    )  # fmt: skip
    with simulate(layer, spec):
        y = layer(x)
    y.backward(g)  # outside: the backward pass needs no mode
    qx, qw, qb = quantize(x.detach(), "E4M3"), quantize(layer.weight.detach(), "E2M3"), layer.bias
    assert torch.equal(y, quantize(F.linear(qx, qw, quantize(qb.detach(), "E3M2")), "E5M2"))
    qg = quantize(g, "E3M4")
    assert torch.equal(x.grad, quantize(qg @ qw, "E2M1"))
    assert torch.equal(layer.weight.grad, quantize(qg.t() @ qx, "FP16"))
    assert torch.equal(layer.bias.grad, qg.sum(0))


def test_the_mask_comes_before_the_rounding_of_the_gradient():
    layer = nn.Linear(2, 2, bias=False)
    nn.init.eye_(layer.weight)
    x = torch.tensor([[500.0, 1.0]], requires_grad=True)
    up = Precision("E4M3", Rounding.UPWARD)
    with simulate(layer, one(input=Precision("E4M3", backward="mask"), grad_input=up)):
        layer(x).backward(torch.tensor([[1.1, 1.1]]))
    assert x.grad.tolist() == [[0, 1.125]]


def test_random_bits_are_those_of_the_definition():
    """(seed, step, site): anybody can compute them again."""
    layer = nn.Sequential(nn.Linear(16, 8, bias=False))
    x = batches(1)[0]
    with simulate(layer, one(input=Precision("E2M1", SR))):
        for step in range(3):
            y = layer(x)
            site = site_hash("0", "linear", "input", 0)
            q = quantize(x, "E2M1", SR, seed=5, step=step, site=site)
            assert torch.equal(y, F.linear(q, layer[0].weight))


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("matmul", lambda a, b: a @ b),
        ("matmul", lambda a, b: torch.matmul(a, other=b)),
        ("matmul", lambda a, b: a.matmul(b)),
        ("matmul", lambda a, b: b.__rmatmul__(a)),
        ("matmul", lambda a, b: torch.mm(a, b)),
        ("matmul", lambda a, b: torch.addmm(torch.zeros(1), a, b)),
        ("bmm", lambda a, b: torch.bmm(a[None], b[None])[0]),
        ("bmm", lambda a, b: torch.baddbmm(torch.zeros(1), a[None], batch2=b[None])[0]),
        ("linear", lambda a, b: F.linear(a, b.t())),
        ("conv1d", lambda a, b: F.conv1d(a.t()[None], b.t()[..., None])[0].t()),
    ],
)  # fmt: skip
def test_functional_calls_however_they_are_spelt(op, call):
    class Net(nn.Module):
        def forward(self, a, b):
            return call(a, b)

    a, b = torch.randn(6, 8), torch.randn(8, 5)
    model = Net()
    with simulate(model, one(op, input="E2M1", weight="E3M2")) as handle:
        y = model(a, b)
    assert torch.allclose(y, quantize(a, "E2M1") @ quantize(b, "E3M2"), atol=1e-5)
    assert [str(s) for s in handle.sites] == [f"(model): {op} {r} #0" for r in ("input", "weight")]


def test_adds_are_residuals_only_and_in_place_stays_in_place():
    class Net(nn.Module):
        def forward(self, x, y):
            x = x + 1 + torch.ones(16)  # neither is a residual
            z = x.clone()
            kept = z
            z += y
            return z, kept, x.add(y)

    model, (x, y) = Net(), batches(2)
    with simulate(model, one("add", input="E2M1", output="E3M2")) as handle:
        z, kept, w = model(x, y)
    want = quantize(quantize(x + 1 + torch.ones(16), "E2M1") + quantize(y, "E2M1"), "E3M2")
    assert torch.equal(z, want) and torch.equal(w, want) and kept is z
    assert {(s.role, s.call) for s in handle.sites} == {
        (r, c) for r in ("input", "input1", "output") for c in (0, 1)
    }
    ints = torch.ones(2, 2, dtype=torch.int64)
    with simulate(model, one("add", input="E2M1")):
        model(*batches(2))
        assert torch.equal((ints + ints), ints * 2)


def test_attention_is_its_two_products():
    q, k, v = (torch.randn(2, 3, 5, 8) for _ in range(3))

    class Net(nn.Module):
        def forward(self, q, k, v, **options):
            return F.scaled_dot_product_attention(q, k, v, **options)

    model = Net()
    # A format that changes nothing: what is left is the decomposition.
    exact = SimulationSpec(Rule(op=("sdpa_qk", "sdpa_pv"), input="FloatingPoint(8, 23)"))
    mask = torch.rand(5, 5) > 0.3
    mask[:, 0] = True
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"scale": 0.3},
                    {"attn_mask": torch.randn(5, 5)}):  # fmt: skip
        with simulate(model, exact):
            got = model(q, k, v, **options)
        assert torch.allclose(got, model(q, k, v, **options), atol=1e-6), options
    grouped = torch.randn(2, 6, 5, 8)
    with simulate(model, exact):
        got = model(grouped, k, v, enable_gqa=True)
    assert torch.allclose(got, model(grouped, k, v, enable_gqa=True), atol=1e-6)
    with simulate(model, SimulationSpec(Rule(op="sdpa_pv", weight="E2M1"))) as handle:
        got = model(q, k, v)
    assert torch.allclose(got, model(q, k, quantize(v, "E2M1")), atol=1e-6)
    assert [str(s) for s in handle.sites] == ["(model): sdpa0.sdpa_pv weight #0"]


def test_the_parts_of_multi_head_attention_are_reached():
    torch.manual_seed(0)
    model = nets.Attention()
    tokens = torch.randint(0, 11, (2, 7))
    with simulate(model, nets.stochastic()) as handle:
        model(tokens).sum().backward()
    ops = {(s.path, s.op) for s in handle.sites}
    assert {("mha", "mha0.linear"), ("mha", "mha0.sdpa0.sdpa_qk"), ("", "sdpa0.sdpa_pv")} <= ops
    assert {("embed", "embedding"), ("norm", "norm"), ("", "add")} <= ops


def test_every_function_of_torch_nn_functional_runs():
    """Those that choose between two functions, and those that call others, pass the mode once."""

    class Net(nn.Module):
        def forward(self, x):
            pooled, where = F.max_pool2d(x, 2, return_indices=True)
            x = F.max_pool2d(x, 2) + F.max_unpool2d(pooled, where, 2)[:, :, ::2, ::2] + pooled
            x = F.adaptive_avg_pool2d(F.dropout(F.gelu(x), 0.0), 2)
            return F.interpolate(F.normalize(F.softmax(x, -1)), scale_factor=2)

    model, x = Net(), torch.randn(1, 2, 8, 8)
    with simulate(model, one("add", output="E4M3")) as handle:
        model(x)
    assert {s.call for s in handle.sites} == {0, 1}


def test_nothing_of_the_model_changes():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    seen = []
    model[0].register_forward_pre_hook(lambda m, a, k: seen.append(k), with_kwargs=True)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    classes = [type(m) for m in model.modules()]
    x = batches(1)[0]
    plain = model(x)
    with simulate(model, one(input="E2M1")):
        assert [type(m) for m in model.modules()] == classes
        assert not torch.equal(model(x), plain)
    assert torch.equal(model(x), plain) and len(seen) == 3
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[k], v) for k, v in before.items())
    assert [len(m._forward_hooks) for m in model.modules()] == [0, 0, 0]
    assert [len(m._forward_pre_hooks) for m in model.modules()] == [0, 1, 0]


def test_an_exception_in_the_model_leaves_no_trace():
    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x, fail=False):
            y = self.fc(x)
            if fail:
                raise RuntimeError("no")
            return y

    model, x = Bad(), batches(1)[0]
    with simulate(model, one(input=Precision("E2M1", SR))) as handle:
        with pytest.raises(RuntimeError, match="no"):
            model(x, fail=True)
        assert handle.position is None and int(handle.step) == 1
        model(x)
    assert max(s.call for s in handle.sites) == 0


def test_one_step_a_pass_and_a_resume_is_bit_for_bit():
    def fresh():
        torch.manual_seed(0)
        return nets.Blocks()

    data = batches(6)
    whole = fresh()
    with simulate(whole, nets.stochastic()) as handle:
        want = nets.train(whole, whole, data)
    assert int(handle.step) == 6
    first = fresh()
    with simulate(first, nets.stochastic()) as handle:
        nets.train(first, first, data[:3])
    saved = copy.deepcopy((first.state_dict(), handle.state_dict()))
    second = fresh()
    second.load_state_dict(saved[0])
    again = simulate(second, nets.stochastic(seed=99))
    again.load_state_dict(saved[1])
    with again:
        losses, grads = nets.train(second, second, data[3:])
    assert nets.same((losses, grads), (want[0][3:], want[1]))


def test_a_state_of_another_spec_is_refused():
    model = nn.Linear(4, 4)
    state = simulate(model, one(input="E4M3")).state_dict()
    other = simulate(model, one(input="E5M2"))
    with pytest.raises(ConfigError, match=r"rule 0 was .*'E4M3'.* and is .*'E5M2'"):
        other.load_state_dict(state)
    more = simulate(model, one(input="E4M3").and_then(Rule(weight="E4M3")))
    with pytest.raises(ConfigError, match="rule 1 was \\(no such rule\\)"):
        more.load_state_dict(state)
    with pytest.raises(ConfigError, match="lacks \\['spec'\\]"):
        other.load_state_dict({"seed": state["seed"], "step": state["step"]})


def test_a_checkpoint_recomputes_with_the_same_bits():
    results = []
    for mode in ("plain", "checkpoint"):
        torch.manual_seed(0)
        model = nets.Blocks(mode)
        handle = simulate(model, nets.stochastic())
        with handle:
            # Two passes before one backward: each recomputes its own step.
            loss = model(batches()[0]).square().sum() + model(batches()[1]).square().sum()
        loss.backward()
        assert int(handle.step) == 2 and not any(m._forward_hooks for m in model.modules())
        results.append(([loss], [p.grad for p in model.parameters()]))
    assert nets.same(*results)


def test_a_reentrant_checkpoint_is_refused():
    model = nets.Blocks("reentrant")
    x = batches(1)[0].requires_grad_()
    with simulate(model, nets.stochastic()):
        loss = model(x).sum()
        with pytest.raises(ConfigError, match="use_reentrant=False"):
            loss.backward()


def test_autocast():
    layer = nn.Linear(16, 8)
    x = batches(1)[0]
    spec = one(input="E4M3", weight="E4M3", output="E3M4")
    with simulate(layer, spec), torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        y.float().sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = F.linear(quantize(x, "E4M3"), quantize(layer.weight.detach(), "E4M3"), layer.bias)
    assert y.dtype == torch.bfloat16 and torch.equal(y, quantize(want.detach(), "E3M4"))
    assert layer.weight.grad.dtype == torch.float32


def test_integer_operands_are_refused_by_name():
    class Net(nn.Module):
        def forward(self, x):
            return x @ x

    model = Net()
    message = r"\(model\): matmul input #0 is torch.int64"
    with simulate(model, one("matmul", input="E4M3")), pytest.raises(ConfigError, match=message):
        model(torch.ones(2, 2, dtype=torch.int64))


def test_a_compiled_model_is_not_simulated_eagerly():
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"options={'simulate': spec}"):
        simulate(torch.compile(model, backend="eager"), one(input="E4M3"))


DDP = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from qinductor import Precision, Rule, SimulationSpec, simulate
sys.path.insert(0, sys.argv[3])
import sim_nets as nets
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nets.Blocks("checkpoint"))
with simulate(model, nets.stochastic()) as handle:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))  # the same on both ranks
    y = model(x)
    y.square().sum().backward()
grads = [p.grad for p in model.parameters()]
torch.save((y.detach(), grads, handle.sites_by_number()), f"rank{rank}.pt")
dist.destroy_process_group()
"""


def test_two_data_parallel_processes(tmp_path):
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", DDP, str(rank), str(tmp_path / "store"), str(here)],
            cwd=tmp_path, env=env,
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [w.wait(timeout=120) for w in workers] == [0, 0]
    (y0, g0, s0), (y1, g1, s1) = (torch.load(tmp_path / f"rank{r}.pt") for r in range(2))
    assert all(torch.equal(a, b) for a, b in zip(g0, g1, strict=True))  # averaged
    assert not torch.equal(y0, y1)  # activations draw other bits on each rank
    common = {role for role, number in s0.items() if s1.get(role) == number}
    assert {r.split()[2] for r in common} == {"weight"}
    torch.manual_seed(0)
    alone = nets.Blocks()
    with simulate(alone, nets.stochastic()):
        y = alone(torch.randn(4, 16, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(y, y0)  # rank 0 is what one process computes
