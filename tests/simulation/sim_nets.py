"""Small nets and specs that the simulation's tests share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import checkpoint

from qinductor.simulation import Handle, Precision, Rule, SimulationSpec
from qinductor.simulation.graph import simulate_graph

SR = "STOCHASTIC"


class ConvNet(nn.Module):
    """Convolution, matmul, ReLU and add: what both executions must compute bit for bit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.mix = nn.Parameter(torch.randn(8, 8) / 3)
        self.head = nn.Linear(8 * 36, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        mixed = (self.mix @ h.flatten(2)).view_as(h)
        h = self.second(h) + h
        h += mixed
        return self.head(F.relu(h).flatten(1))


class Blocks(nn.Module):
    """A block that is called twice, perhaps under a checkpoint, of a function or of a module."""

    def __init__(self, mode: str = "plain") -> None:
        super().__init__()
        self.mode = mode
        self.up = nn.Linear(16, 24, bias=False)
        self.down = nn.Linear(24, 16, bias=False)
        self.body = nn.Sequential(nn.Linear(16, 16, bias=False), nn.ReLU())

    def block(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            if self.mode == "plain":
                x = self.body(self.block(x))
            else:
                reentrant = self.mode == "reentrant"
                x = checkpoint(self.block, x, use_reentrant=reentrant)
                x = checkpoint(self.body, x, use_reentrant=reentrant)
        return x


class Attention(nn.Module):
    """Both ways to attention, an embedding and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.norm = nn.LayerNorm(16)
        self.mha = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        x = x + self.mha(x, x, x, need_weights=False)[0]
        q = x.unflatten(-1, (2, 8)).transpose(1, 2)
        own = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return x + own.transpose(1, 2).flatten(2)


def stochastic(seed: int = 1) -> SimulationSpec:
    """Every role, stochastic, of everything that the nets above do."""
    eight = Precision("E4M3", SR, random_bits=8)
    grad = Precision("E5M2", SR, random_bits=8)
    flow = {"input": eight, "output": Precision("FP16", SR), "grad_output": grad}
    flow["grad_input"] = grad
    return SimulationSpec(
        (
            Rule(op=("linear", "conv2d", "matmul", "bmm", "sdpa_qk", "sdpa_pv"), optional=True,
                 **flow, weight=eight, grad_weight=grad),
            Rule(op=("add", "norm"), optional=True, **flow),
            Rule(op="embedding", optional=True, weight=eight, grad_weight=grad),
        ),
        seed=seed,
    )  # fmt: skip


def train(
    model: nn.Module, run: nn.Module, batches: list[Tensor], lr: float = 0.05
) -> tuple[list[Tensor], list[Tensor]]:
    """SGD on Σy²: the losses, and the last gradients. ``run`` is the model or its compiled form."""
    losses = []
    for x in batches:
        model.zero_grad(set_to_none=True)
        loss = run(x).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for p in model.parameters():
                p -= lr * p.grad
    return losses, [p.grad for p in model.parameters()]


def same(a: tuple[list[Tensor], list[Tensor]], b: tuple[list[Tensor], list[Tensor]]) -> bool:
    return all(
        torch.equal(x, y) for left, right in zip(a, b, strict=True)
        for x, y in zip(left, right, strict=True)
    )  # fmt: skip


def rewritten(model: nn.Module, handle: Handle, through: str | None = None, **options: Any) -> Any:
    """The model with its graph rewritten, and run as it is or by another backend."""

    def backend(gm, inputs):
        graph = simulate_graph(gm, handle, complete=True)
        run = graph.module
        if through is not None:
            run = lookup_backend(through)(run, [*inputs, *graph.example_inputs()])
        return lambda *args: run(*args, *graph.more_inputs())

    return torch.compile(model, backend=backend, **options)
