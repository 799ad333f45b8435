"""Train a small character-level transformer in a low-precision format.

``python examples/train_transformer.py --preset mxfp4`` reads Tiny Shakespeare; ``--text FILE`` your
own text. Any preset of :data:`qinductor.simulation.PRESETS` works, or ``--spec FILE``.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn

import qinductor
from qinductor.simulation import PRESETS, SimulationSpec
from qinductor.text import data_folder


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) → (B, T, width)."""
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0)
        q, k, v = (part.transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CharTransformer(nn.Module):
    """Next-character logits (B, T, V) of characters (B, T)."""

    def __init__(self, characters: int, width: int = 128, layers: int = 6, span: int = 64) -> None:
        super().__init__()
        self.token = nn.Embedding(characters, width)
        self.position = nn.Embedding(span, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next character at each position."""
        where = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(where))))


def read(path: Path | None) -> tuple[Tensor, int]:
    """A text as character numbers (N,) int64, and how many characters there are.

    Raises:
        FileNotFoundError: no file was named and the data folder has none.
    """
    if path is None:
        folder = data_folder() or Path()
        path = folder / "text" / "tinyshakespeare.txt"
    text = path.read_text(encoding="utf-8")
    numbers = {c: i for i, c in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[c] for c in text]), len(numbers)


def train(arguments: argparse.Namespace) -> float:
    """Train, and return the validation loss in nats a character."""
    torch.manual_seed(arguments.seed)
    tokens, characters = read(arguments.text)
    learn, check = tokens[: -len(tokens) // 10], tokens[-len(tokens) // 10 :]
    model = CharTransformer(characters, arguments.width, arguments.layers, arguments.span)
    spec = None
    if arguments.spec or arguments.preset != "fp32":
        spec = (
            SimulationSpec.load(arguments.spec)
            if arguments.spec
            else SimulationSpec.preset(arguments.preset, seed=arguments.seed)
        )
    run, block = model, contextlib.nullcontext()
    if spec is not None and arguments.compile:
        run = torch.compile(model, backend="qsim", options={"simulate": spec})
    elif spec is not None:
        block = qinductor.simulate(model, spec)
    elif arguments.compile:
        run = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(arguments.seed)

    def loss_on(text: Tensor) -> Tensor:
        starts = torch.randint(
            0, len(text) - arguments.span - 1, (arguments.batch,), generator=generator
        )
        rows = text[starts[:, None] + torch.arange(arguments.span + 1)]
        return F.cross_entropy(run(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    with block, Progress(transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(arguments.preset, total=arguments.steps)
        for _ in range(arguments.steps):
            loss = loss_on(learn)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress.update(task, advance=1, description=f"loss {loss.item():.3f}")
        with torch.no_grad():
            return sum(loss_on(check).item() for _ in range(10)) / 10


def main(argv: list[str] | None = None) -> float:
    """Parse the command line, train, print the loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=["fp32", *PRESETS], default="fp8")
    parser.add_argument("--spec", type=Path, help=".toml or .json instead of a preset")
    parser.add_argument("--text", type=Path, help="a text file")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--span", type=int, default=64, help="characters of context")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="simulate in the compiler")
    arguments = parser.parse_args(argv)
    result = train(arguments)
    print(f"{arguments.preset}: validation loss {result:.3f} nats a character")
    return result


if __name__ == "__main__":
    main()
