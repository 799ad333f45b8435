"""Small nets with random weights, one for each thing that prepare and convert have to handle."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 64


class SharedInput(nn.Module):
    """Two Linears read the same tensor, one of them through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 96)
        self.b = nn.Linear(WIDTH, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x), self.b(x.reshape(-1, WIDTH)).reshape(*x.shape[:-1], 48)], -1)


class PreNorm(nn.Module):
    """A pre-norm block: only the Linears read the LayerNorm's output."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm(WIDTH)
        self.up = nn.Linear(WIDTH, 128)
        self.gate = nn.Linear(WIDTH, 128)
        self.down = nn.Linear(128, WIDTH)
        with torch.no_grad():
            self.norm.weight.uniform_(0.1, 4.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Mlp(nn.Module):
    """Two Linears with an activation between them."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 128)
        self.activation = activation
        self.second = nn.Linear(128, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.activation(self.first(x)))


class Attention(nn.Module):
    """Self-attention with masks, by sdpa or written out; the value path keeps its channels."""

    def __init__(self, heads: int = 4, written_out: bool = False, fused_qkv: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.written_out = written_out
        self.fused = nn.Linear(WIDTH, 3 * WIDTH) if fused_qkv else None
        if not fused_qkv:
            self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        b, s, _ = x.shape
        if self.fused is not None:
            q, k, v = self.fused(x).chunk(3, dim=-1)
        else:
            q, k, v = self.query(x), self.key(x), self.value(x)
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        mask = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        if self.written_out:
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            if mask is not None:
                scores = scores.masked_fill(~mask, float("-inf"))
            y = torch.matmul(scores.softmax(-1), v)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).reshape(b, s, -1))


class TwoLayers(nn.Module):
    """Token embeddings and two attention layers: the smallest masked encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList([Attention(), Attention()])
        self.pooler = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return torch.cat([x, self.pooler(x[:, 0])[:, None]], dim=1)


def outlier_input(*shape: int, seed: int = 0) -> Tensor:
    """Normal values whose channels 3 and 40 are 50 times larger."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x[..., 3] *= 50
    x[..., 40] *= 50
    return x


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference by the norm of what was expected."""
    actual, expected = actual.detach().float(), expected.detach().float()
    return float((actual - expected).norm() / expected.norm())


def token_batch(lengths: list[int], width: int, fill: int, seed: int) -> dict[str, Tensor]:
    """Random ids of these lengths, padded to ``width`` with the id ``fill``, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((len(lengths), width), fill)
    mask = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(0, 50, (length,), generator=generator)
        mask[row, :length] = 1
    return {"input_ids": ids, "attention_mask": mask}
