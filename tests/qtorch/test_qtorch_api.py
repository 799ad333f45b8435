"""QPyTorch's functions, modules, optimizer and conversion; scripts written for it, unchanged."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import qinductor.qtorch as qt
from qinductor.numerics import Quantizer as OwnQuantizer
from qinductor.numerics import Rounding, decode, describe, encode, parse_format, quantize
from qinductor.qtorch.auto_low import LAYER_TYPES, lower, sequential_lower
from qinductor.qtorch.optim import OptimLP
from qinductor.qtorch.quant import Quantizer, block_quantize, float_quantize, quantizer

NUMBERS = [
    qt.FixedPoint(8, 4),
    qt.FixedPoint(8, 4, clamp=False),
    qt.FloatingPoint(4, 3),
    qt.BlockFloatingPoint(8),
    qt.BlockFloatingPoint(8, 1),
]
ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).with_name("scripts")


def run(code_or_script, *arguments):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *code_or_script, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def test_a_script_runs_unchanged():
    done = run(["-m", "qinductor.qtorch", str(SCRIPTS / "quick_tour.py")], "one", "two")
    assert done.returncode == 0, done.stderr
    # The hook gives 1 each, which is clamped; -2 and 0.999, once rounded, were outside.
    assert "clamped: tensor([0.0000, 0.9922, 0.0000])" in done.stdout
    assert "['one', 'two']" in done.stdout


def test_a_missing_script_and_a_second_qtorch_are_errors(tmp_path):
    done = run(["-m", "qinductor.qtorch", "no_such.py"])
    assert done.returncode == 2 and "no_such.py" in done.stderr
    (tmp_path / "qtorch.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import qtorch, qinductor.qtorch\n"
    done = run(["-c", code + "qinductor.qtorch.install()"])
    assert "imported already" in done.stderr
    code = "import qinductor.qtorch as q; q.install(); q.install(); import qtorch.number"
    assert run(["-c", code]).returncode == 0


def test_importing_it_compiles_nothing():
    code = "import sys, qinductor.qtorch.quant as q; print('torch._inductor' in sys.modules)"
    assert run(["-c", code]).stdout.strip() == "False"


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_formats_are_formats(number):
    assert parse_format(repr(number)) == number
    assert pickle.loads(pickle.dumps(number)) == number
    assert repr(number) in describe(number)
    x = torch.randn(6, 10) * 3
    q = quantize(x, number)
    assert torch.equal(quantize(q, number), q)
    again = quantize(x, number, Rounding.STOCHASTIC, seed=1)
    assert torch.equal(again, quantize(x, number.plain, Rounding.STOCHASTIC, seed=1))
    assert torch.equal(quantize(x.clone(), number, out=torch.empty(10, 6).t()), q)
    own = OwnQuantizer(number)(x)
    assert torch.equal(own, q)
    if number != qt.FixedPoint(8, 4, clamp=False):
        assert torch.equal(decode(encode(x, number), number), q)
    with pytest.raises(ValueError, match="STOCHASTIC"):
        quantize(x, number, Rounding.UPWARD)
    with pytest.raises(ValueError, match="float32"):
        quantize(x.double(), number)


def test_compiled_is_eager():
    x = torch.cat([torch.randn(500) * 4, torch.tensor([0.5 + 2.0**-24, -0.0, float("nan")])])
    numbers = [n.replace(fl=0) if isinstance(n, qt.FixedPoint) else n for n in NUMBERS[:-1]]

    def every(t):
        return [quantize(t, n) for n in numbers]

    for got, want in zip(torch.compile(every, fullgraph=True)(x), every(x), strict=True):
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))


def test_quantizer_rounds_both_ways_and_compiles():
    both = quantizer(
        *(qt.FixedPoint(4, 2), qt.FloatingPoint(5, 2), "nearest", "nearest"),
        clamping_grad_zero=True,
        backward_hooks=[lambda g: g * 3],
    )
    x = torch.tensor([0.3, 1.88, 1.87, -2.2, -2.1, float("nan")], requires_grad=True)
    grad = torch.tensor([1.1, 1.1, 1.1, 1.1, 1.1, 1.1])
    for f in (both, torch.compile(both, fullgraph=True)):
        x.grad = None
        y = f(x)
        assert y[:-1].tolist() == [0.25, 1.75, 1.75, -2, -2] and y[-1].isnan()
        y.backward(grad)
        # 1.88 rounds to 2, outside; -2.1 rounds to -2, inside.
        assert x.grad.tolist() == [3.5, 0, 3.5, 0, 3.5, 3.5]


def test_the_mask_and_hooks_do_not_need_a_backward_number():
    q = quantizer(qt.FixedPoint(4, 2), None, "nearest", clamping_grad_zero=True,
                  backward_hooks=[torch.neg])  # fmt: skip
    x = torch.tensor([0.3, 9.0], requires_grad=True)
    q(x).sum().backward()
    assert x.grad.tolist() == [-1, 0]


def test_a_masked_gradient_still_scales_its_block():
    q = quantizer(*(qt.FixedPoint(4, 2), qt.BlockFloatingPoint(4), "nearest", "nearest"),
                  clamping_grad_zero=True)  # fmt: skip
    x = torch.tensor([0.3, 9.0], requires_grad=True)
    q(x).backward(torch.tensor([0.3, 100.0]))
    assert x.grad.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: quantizer(qt.FloatingPoint(4, 3), clamping_grad_zero=True), "clamped FixedPoint"),
        (lambda: quantizer(8), "forward_number=8"),
        (lambda: quantizer(forward_rounding="up"), "nearest, stochastic"),
        (lambda: float_quantize(torch.ones(1), 9, 3), "exp=9"),
        (lambda: float_quantize([1.0], 4, 3), "list"),
        (lambda: float_quantize(torch.ones(1).half(), 4, 3), "float16"),
        (lambda: block_quantize(torch.ones(2), 8, 1), "valid: -1 to 0"),
        (lambda: qt.FixedPoint(1, 0), "wl=1"),
        (lambda: qt.FixedPoint(8, 4, 1), "clamp=1"),
        (lambda: qt.FixedPoint(8, 4, clamp=False).values, "bounded"),
        (lambda: lower(nn.Linear(1, 1), ["linears"]), "conv, linear"),
        (lambda: OptimLP([1]), "optimizer"),
        (lambda: OptimLP(torch.optim.SGD([torch.ones(1)], lr=1), grad_scaling=0), "positive"),
    ],
)
def test_bad_input(make, match):
    with pytest.raises(ValueError, match=match):
        make()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.GELU())
        self.head = nn.ModuleDict({"out": nn.Linear(6, 2)})

    def forward(self, x, scale=1.0):
        return self.head["out"](self.layers(x)) * scale


def test_lower_quantizes_outputs_in_place():
    model = Net()
    keys = list(model.state_dict())
    lower(model, ["linear"], qt.FloatingPoint(4, 3), forward_rounding="nearest")
    assert list(model.state_dict()) == keys
    x = torch.randn(3, 4)
    out = model(x, scale=1.0)
    assert torch.equal(out, float_quantize(out, 4, 3, "nearest"))
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(x), out) and torch.equal(copy.deepcopy(model)(x), out)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), out)


def test_sequential_lower_leaves_the_model_alone():
    model = Net()
    low = sequential_lower(model, ["linear", "activation"], qt.BlockFloatingPoint(4, 0),
                           forward_rounding="nearest")  # fmt: skip
    assert [type(m) for m in model.layers] == [nn.Linear, nn.GELU]
    assert [type(m) for m in low.layers] == [nn.Sequential, nn.Sequential]
    assert "head.out.0.weight" in low.state_dict()
    assert low.layers[0][0].weight is not model.layers[0].weight
    x = torch.randn(3, 4)
    q = low.layers[1](x)
    assert torch.equal(q, block_quantize(nn.functional.gelu(x), 4, 0, "nearest"))
    leaf = sequential_lower(nn.ReLU(), ["activation"], qt.FixedPoint(4, 2))
    assert isinstance(leaf[1], Quantizer)


def test_layer_types_hold_what_qpytorch_lists():
    assert {k: len(v) for k, v in LAYER_TYPES.items()} == {
        "conv": 8,
        "linear": 2,
        "pool": 18,
        "pad": 8,
        "activation": 28,
        "normalization": 9,
        "dropout": 4,
        "loss": 16,
    }


@pytest.mark.parametrize("inner", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_optimizer_resumes_bit_for_bit(inner):
    def make():
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(20))
        unused = nn.Parameter(torch.ones(2))
        options = {"momentum": 0.9} if inner in ("SGD", "RMSprop") else {"amsgrad": True}
        optimizer = getattr(torch.optim, inner)([p, unused], lr=0.05, **options)
        low = quantizer(qt.FloatingPoint(4, 3), forward_rounding="nearest")
        wide = quantizer(qt.FloatingPoint(6, 9), forward_rounding="nearest")
        return p, OptimLP(
            optimizer, weight_quant=low, grad_quant=low, momentum_quant=wide, acc_quant=wide
        )

    def go(p, optimizer, steps):
        for k in steps:
            p.grad = torch.sin(torch.arange(20.0) + k)
            optimizer.step()

    p, optimizer = make()
    go(p, optimizer, range(3))
    saved = pickle.loads(pickle.dumps((p.detach(), optimizer.state_dict())))
    go(p, optimizer, range(3, 6))
    q, other = make()
    q.data = saved[0]
    other.load_state_dict(saved[1])
    go(q, other, range(3, 6))
    assert torch.equal(p, q) and torch.equal(optimizer.weight_acc[p], other.weight_acc[q])
    momenta = [v for v in optimizer.state[p].values() if v.shape == p.shape]
    assert momenta
    assert all(torch.equal(m, float_quantize(m, 6, 9, "nearest")) for m in momenta)
    with pytest.raises(ValueError, match="1 accumulators"):
        state = optimizer.state_dict()
        other.load_state_dict({**state, "weight_acc": state["weight_acc"][:1]})


def test_optimizer_steps():
    p = nn.Parameter(torch.tensor([1.0]))
    optimizer = OptimLP(torch.optim.SGD([p], lr=1.0), grad_scaling=0.5,
                        weight_quant=lambda t: float_quantize(t, 4, 3, "nearest"))  # fmt: skip

    def closure():
        optimizer.zero_grad()
        loss = (p * 0.3).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.item() == pytest.approx(0.3) and p.grad.item() == pytest.approx(0.15)
    assert p.item() == 0.875, "1 - 0.15, rounded"
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    schedule.step()
    assert optimizer.optim.param_groups[0]["lr"] == 0.5
