"""LowPrecision and WeightAverage: what a step rounds, any optimizer, resume bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qinductor import ConfigError, Precision, Rule, SimulationSpec, quantize, simulate
from qinductor.optim import LowPrecision, WeightAverage

SR = "STOCHASTIC"
EVERYTHING = {
    "weight": Precision("FixedPoint(8, 6)", SR),
    "gradient": Precision("E5M2", SR),
    "momentum": Precision("FP16", SR, random_bits=8),
    "accumulator": Precision("FixedPoint(16, 12)", SR),
    "grad_scaling": 0.5,
}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def data(n):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(16, 8, generator=generator) for _ in range(n)]


def steps(model, optimizer, batches, scheduler=None):
    for x in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(16) % 3).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def on_grid(x, fmt):
    return torch.equal(quantize(x.detach(), fmt), x.detach())


def test_a_step_is_what_it_says():
    model = net()
    w = [p.detach().clone() for p in model.parameters()]
    optimizer = LowPrecision(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        weight="FixedPoint(6, 4)", gradient="E5M2", momentum="E4M3", accumulator="FP16",
        grad_scaling=2.0,
    )  # fmt: skip
    masters = [quantize(p, "FP16") for p in w]
    buffers = [None] * len(w)
    for x in data(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(16) % 3).backward()
        grads = [quantize(p.grad * 2, "E5M2") for p in model.parameters()]
        optimizer.step()
        for i, (p, g) in enumerate(zip(model.parameters(), grads, strict=True)):
            moved = g if buffers[i] is None else buffers[i] * 0.9 + g
            masters[i] = quantize(masters[i].add(moved, alpha=-0.1), "FP16")
            buffers[i] = quantize(moved, "E4M3")
            assert torch.equal(p.grad, g)
            assert torch.equal(p, quantize(masters[i], "FixedPoint(6, 4)"))
            assert torch.equal(optimizer.state[p]["momentum_buffer"], buffers[i])


MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


@pytest.mark.parametrize("name", MAKERS)
def test_any_optimizer_resumes_bit_for_bit(name, tmp_path):
    batches = data(10)

    def fresh():
        model = net()
        optimizer = LowPrecision(MAKERS[name](model.parameters()), seed=3, **EVERYTHING)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    whole = fresh()
    steps(whole[0], whole[1], batches, whole[2])
    half = fresh()
    steps(half[0], half[1], batches[:5], half[2])
    torch.save([part.state_dict() for part in half], tmp_path / "half.pt")
    again = fresh()
    for part, state in zip(again, torch.load(tmp_path / "half.pt"), strict=True):
        part.load_state_dict(state)
    steps(again[0], again[1], batches[5:], again[2])
    for p, q in zip(whole[0].parameters(), again[0].parameters(), strict=True):
        assert torch.equal(p, q) and on_grid(p, "FixedPoint(8, 6)")
        for key, value in whole[1].state[p].items():
            assert not torch.is_tensor(value) or not value.dim() or on_grid(value, "FP16"), key
    assert (
        whole[1].param_groups[0]["lr"]
        == again[1].param_groups[0]["lr"]
        < MAKERS[name](net().parameters()).param_groups[0]["lr"]
    )


def test_stochastic_everything_with_a_simulated_model_resumes():
    """Forward, weights and momentum stochastic: 8 steps are 4, saved and loaded, and 4 more."""
    batches = data(8)
    spec = SimulationSpec(
        Rule(op="linear", input=Precision("E4M3", SR), grad_output=Precision("E5M2", SR)), seed=1
    )

    def fresh():
        model = net()
        handle = simulate(model, spec)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, LowPrecision(sgd, seed=3, simulation=handle, **EVERYTHING), handle

    whole = fresh()
    with whole[2]:
        steps(*whole[:2], batches)
    half = fresh()
    with half[2]:
        steps(*half[:2], batches[:4])
    saved = copy.deepcopy([half[0].state_dict(), half[1].state_dict()])
    again = fresh()
    again[0].load_state_dict(saved[0])
    again[1].load_state_dict(saved[1])
    assert int(again[2].step) == 4
    with again[2]:
        steps(*again[:2], batches[4:])
    pairs = zip(whole[0].parameters(), again[0].parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


def test_closures_are_evaluated_at_rounded_weights():
    model = net()
    optimizer = LowPrecision(
        torch.optim.LBFGS(model.parameters(), max_iter=4),
        weight="FixedPoint(10, 8)", accumulator="full", gradient="FP16",
    )  # fmt: skip
    optimizer.round_weights()
    x, calls = data(1)[0], 0

    def closure():
        nonlocal calls
        calls += 1
        assert all(on_grid(p, "FixedPoint(10, 8)") for p in model.parameters())
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), torch.arange(16) % 3)
        loss.backward()
        return loss

    before = optimizer.step(closure)
    after = optimizer.step(closure)
    assert calls > 2 and after < before
    assert all(on_grid(p, "FixedPoint(10, 8)") for p in model.parameters())


def test_a_closure_changes_nothing_for_sgd():
    results = []
    for with_closure in (False, True):
        model, x = net(), data(1)[0]
        optimizer = LowPrecision(torch.optim.SGD(model.parameters(), lr=0.1), seed=1, **EVERYTHING)

        def closure(model=model, optimizer=optimizer, x=x):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), torch.arange(16) % 3)
            loss.backward()
            return loss

        for _ in range(3):
            if with_closure:
                assert optimizer.step(closure).item() > 0
            else:
                closure()
                assert optimizer.step() is None
        results.append(list(model.parameters()))
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


def test_groups_and_missing_gradients():
    model = net()
    model[0].bias.requires_grad_(False)
    plain = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    optimizer = LowPrecision(
        torch.optim.SGD([{"params": matrices}, {"params": plain, "low_precision": False}], lr=0.1),
        weight="FixedPoint(6, 4)",
    )
    before = plain[0].clone()
    steps(model, optimizer, data(2))
    assert all(on_grid(p, "FixedPoint(6, 4)") for p in matrices)
    assert torch.equal(plain[0], before) and not on_grid(plain[1], "FixedPoint(6, 4)")
    extra = nn.Parameter(torch.full((3,), 0.3))
    optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(extra, torch.full((3,), 0.1875))  # 0.2 on a grid of 1/16


def test_gradients_are_unscaled_before_they_are_rounded():
    for fused in (False, True):
        model = net()
        optimizer = LowPrecision(
            torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), gradient="E5M2"
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=3.0)
        x = data(1)[0]
        loss = F.cross_entropy(model(x), torch.arange(16) % 3)
        want = torch.autograd.grad(loss * 3, list(model.parameters()), retain_graph=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        inverse = torch.tensor(3.0).double().reciprocal().float()
        for p, g in zip(model.parameters(), want, strict=True):
            assert torch.equal(p.grad, quantize(g * inverse, "E5M2"))


def test_sparse_gradients():
    table = nn.Embedding(5, 4, sparse=True)
    optimizer = LowPrecision(torch.optim.SGD(table.parameters(), lr=0.1), gradient="E2M1")
    (table(torch.tensor([1, 1, 3])) * 1.3).sum().backward()
    optimizer.step()
    assert table.weight.grad.coalesce().values().unique().tolist() == [1.5, 3.0]


def test_wrong_arguments_and_states():
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped = LowPrecision(sgd, weight="E4M3")
    with pytest.raises(ConfigError, match=r"wrapped already.*wrapped\.optimizer"):
        LowPrecision(wrapped, weight="E4M3")
    with pytest.raises(ConfigError, match=r"wraps a torch.optim.Optimizer, not 3"):
        LowPrecision(3)
    with pytest.raises(ConfigError, match=r"gradient: 'E9M9' is not a format"):
        LowPrecision(sgd, gradient="E9M9")
    with pytest.raises(ConfigError, match=r"grad_scaling=0"):
        LowPrecision(sgd, grad_scaling=0)
    with pytest.raises(ConfigError, match=r"no 'recipe'|no 'optimizer'"):
        wrapped.load_state_dict(sgd.state_dict())
    with pytest.raises(ConfigError, match=r"weight=.*exp=4.*this optimizer has none"):
        LowPrecision(sgd).load_state_dict(wrapped.state_dict())
    with pytest.raises(ConfigError, match=r"lacks the state of a simulation"):
        handle = simulate(model, SimulationSpec(Rule(input="E4M3")))
        LowPrecision(sgd, weight="E4M3", simulation=handle).load_state_dict(wrapped.state_dict())
    named = LowPrecision(sgd, momentum={"exp_avg": "FP16"})
    with pytest.raises(ConfigError, match=r"'exp_avg', which SGD .*keeps: momentum_buffer"):
        steps(model, named, data(1))
    assert "weight=FloatingPoint(exp=4" in repr(wrapped)


def test_the_average_is_the_mean_in_its_format():
    model = net()
    average = WeightAverage(model, Precision("FixedPoint(12, 10)", SR), seed=2)
    exact = WeightAverage(model)
    with pytest.raises(ConfigError, match=r"update"), average.applied():
        pass
    seen = []
    for _ in range(4):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.1)
        average.update()
        exact.update()
        seen.append([p.detach().clone() for p in model.parameters()])
    now = [p.detach().clone() for p in model.parameters()]
    with exact.applied():
        for i, p in enumerate(model.parameters()):
            assert torch.allclose(p, torch.stack([s[i] for s in seen]).mean(0), atol=1e-6)
    with average.applied() as averaged:
        rounded = [p.detach().clone() for p in averaged.parameters()]
        assert all(on_grid(p, "FixedPoint(12, 10)") for p in averaged.parameters())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), now, strict=True))
    again = WeightAverage(model, Precision("FixedPoint(12, 10)", SR), seed=9)
    again.load_state_dict(copy.deepcopy(average.state_dict()))
    again.update()
    average.update()
    for left, right in zip(*(a.state_dict()["average"].values() for a in (again, average)),
                           strict=True):  # fmt: skip
        assert torch.equal(left, right)
    assert not all(
        torch.equal(p, q)
        for p, q in zip(rounded, average.state_dict()["average"].values(), strict=True)
    )
    with pytest.raises(ConfigError, match=r"saved in FixedPoint"):
        exact.load_state_dict(average.state_dict())
    with pytest.raises(ConfigError, match=r"other parameters"):
        WeightAverage(nn.Linear(2, 2)).load_state_dict(exact.state_dict())
