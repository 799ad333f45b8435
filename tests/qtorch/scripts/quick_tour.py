"""A script for QPyTorch, as its overview shows the package: functions, modules, an optimizer."""

import sys

import qtorch
import torch
from qtorch import BlockFloatingPoint, FixedPoint, FloatingPoint
from qtorch.auto_low import lower, sequential_lower
from qtorch.optim import OptimLP
from qtorch.quant import (
    Quantizer,
    block_quantize,
    fixed_point_quantize,
    float_quantize,
    quantizer,
)
from torch import nn
from torch.optim import SGD, Adam

torch.manual_seed(0)
x = torch.rand(5)
print("tensor:", x)
for rounding in ("nearest", "stochastic"):
    print(rounding, float_quantize(x, exp=5, man=2, rounding=rounding))
    print(rounding, fixed_point_quantize(x, wl=4, fl=2, rounding=rounding))
    print(rounding, block_quantize(x, wl=8, dim=-1, rounding=rounding))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 1)
        self.act = nn.ReLU()
        self.quant = Quantizer(
            forward_number=FixedPoint(wl=8, fl=4),
            backward_number=FloatingPoint(exp=5, man=2),
            forward_rounding="nearest",
            backward_rounding="stochastic",
        )

    def forward(self, t):
        return self.second(self.quant(self.act(self.first(t))))


def train(model, optimizer, steps=60):
    data = torch.rand(64, 5)
    target = data.sum(1, keepdim=True)
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(data), target)
        optimizer.zero_grad()
        (loss * 100).backward()
        optimizer.step()
    return loss.item()


small, half = FloatingPoint(exp=5, man=2), FloatingPoint(exp=6, man=9)
for inner in (SGD, Adam):
    net = Net()
    optimizer = OptimLP(
        inner(net.parameters(), lr=0.01),
        weight_quant=quantizer(forward_number=small, forward_rounding="nearest"),
        grad_quant=lambda t: float_quantize(t, exp=5, man=2, rounding="nearest"),
        momentum_quant=quantizer(forward_number=half),
        acc_quant=quantizer(forward_number=half),
        grad_scaling=1 / 100,
    )
    print(optimizer, train(net, optimizer))
    accumulator = optimizer.weight_acc[net.first.weight]
    assert torch.equal(accumulator, float_quantize(accumulator, 6, 9, "nearest"))
    weight = net.first.weight.data
    assert torch.equal(weight, float_quantize(weight, 5, 2, "nearest"))

wage = quantizer(
    forward_number=FixedPoint(8, 7, clamp=True, symmetric=True),
    backward_number=FixedPoint(8, 7, clamp=True, symmetric=True),
    forward_rounding="nearest",
    backward_rounding="nearest",
    clamping_grad_zero=True,
    backward_hooks=[lambda g: g / g.abs().max()],
)
y = torch.tensor([-2.0, 0.3, 0.999], requires_grad=True)
wage(y).sum().backward()
print("gradient where nothing was clamped:", y.grad)

plain = nn.Sequential(nn.Linear(5, 3), nn.ReLU())
low = sequential_lower(
    plain,
    layer_types=["linear", "activation"],
    forward_number=BlockFloatingPoint(8, dim=0),
    forward_rounding="nearest",
)
print(low)
lower(plain, layer_types=["linear"], forward_number=small, backward_number=small)
print(plain(torch.rand(2, 5)), qtorch.__name__, sys.argv[1:])
