"""Train a small VGG on CIFAR-10 in low precision.

``python examples/train_vgg.py --recipe block8``, with one of fp32, fp16, block8, wage, swalp, ibm8,
fixed8 and fixed8_nearest. What each rounds is in :data:`RECIPES`; ``--spec FILE`` takes your own.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

import cifar10
import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn

import qinductor
from qinductor.optim import LowPrecision, WeightAverage
from qinductor.simulation import Precision, SimulationSpec

STOCHASTIC = "STOCHASTIC"
BLOCK8 = Precision("BlockFloatingPoint(8)", STOCHASTIC)
FIXED8 = Precision("FixedPoint(8, 7)", STOCHASTIC)
IBM16 = Precision("DLFLOAT16", STOCHASTIC)

RECIPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"preset": "fp16", "weight": "FP16", "accumulator": "full"},
    "block8": {"preset": "block8", "weight": BLOCK8, "momentum": BLOCK8, "gradient": BLOCK8},
    # 2-bit weights for every product, from an 8-bit copy that 8-bit gradients move.
    "wage": {"preset": "wage", "gradient": BLOCK8, "weight": FIXED8},
    "swalp": {
        "preset": "swalp", "weight": BLOCK8, "momentum": BLOCK8, "gradient": BLOCK8,
        "average": Precision("BlockFloatingPoint(16)"),
    },
    "ibm8": {"preset": "ibm8", "weight": IBM16, "momentum": IBM16},
    # Weights alone in 8-bit fixed point: what the mode of rounding does to small updates.
    "fixed8": {"weight": FIXED8},
    "fixed8_nearest": {"weight": Precision("FixedPoint(8, 7)")},
}  # fmt: skip


class VggSmall(nn.Module):
    """Six convolutions in three stages, batch norm, one linear layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for stage in (width, 2 * width, 4 * width):
            for _ in range(2):
                layers += [nn.Conv2d(channels, stage, 3, padding=1, bias=False)]
                layers += [nn.BatchNorm2d(stage), nn.ReLU()]
                channels = stage
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(16 * channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, 10) of images (N, 3, 32, 32)."""
        return self.classifier(self.features(images).flatten(1))


def accuracy(model: nn.Module, split: cifar10.Split) -> float:
    """Share of the images that the model names right."""
    model.eval()
    with torch.no_grad():
        right = sum(
            int((model(x).argmax(1) == y).sum())
            for x, y in zip(split.images.split(500), split.labels.split(500), strict=True)
        )
    model.train()
    return right / len(split.labels)


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirrored or not, and moved by up to 4 pixels."""
    mirrored = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    images = torch.where(mirrored, images.flip(3), images)
    dy, dx = torch.randint(0, 9, (2,), generator=generator).tolist()
    return F.pad(images, (4, 4, 4, 4))[:, :, dy : dy + 32, dx : dx + 32]


def train(arguments: argparse.Namespace) -> float:
    """Train, and return the test accuracy."""
    torch.manual_seed(arguments.seed)
    train_split, test_split = cifar10.load(arguments.data, train=arguments.images)
    model = VggSmall(arguments.width)
    recipe = dict(RECIPES[arguments.recipe])
    preset, average_format = recipe.pop("preset", None), recipe.pop("average", None)
    spec = SimulationSpec.load(arguments.spec) if arguments.spec else None
    if spec is None and preset:
        spec = SimulationSpec.preset(preset, seed=arguments.seed)

    run, block = model, contextlib.nullcontext()
    if spec is not None and arguments.compile:
        run = torch.compile(model, backend="qsim", options={"simulate": spec})
    elif spec is not None:
        block = qinductor.simulate(model, spec)
    elif arguments.compile:
        run = torch.compile(model)

    steps = arguments.epochs * -(-len(train_split.labels) // arguments.batch)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    optimizer = LowPrecision(sgd, seed=arguments.seed, **recipe) if recipe else sgd
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.lr, total_steps=steps)
    average = WeightAverage(model, average_format) if average_format else None
    generator = torch.Generator().manual_seed(arguments.seed)
    with block, Progress(transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(arguments.recipe, total=steps)
        for epoch in range(arguments.epochs):
            order = torch.randperm(len(train_split.labels), generator=generator)
            for batch in order.split(arguments.batch):
                images = augmented(train_split.images[batch], generator)
                loss = F.cross_entropy(run(images), train_split.labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                progress.update(task, advance=1, description=f"loss {loss.item():.3f}")
            if average is not None and epoch >= arguments.epochs * 3 // 4:
                average.update()
        weights = average.applied() if average is not None else contextlib.nullcontext()
        with weights:
            if average is not None:
                batches = train_split.images.split(arguments.batch)
                torch.optim.swa_utils.update_bn(batches, model)
            return accuracy(run, test_split)


def main(argv: list[str] | None = None) -> float:
    """Parse the command line, train, print the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", choices=RECIPES, default="block8")
    parser.add_argument("--spec", type=Path, help=".toml or .json instead of the recipe's preset")
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10")
    parser.add_argument("--images", type=int, help="train on this many images only")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.15, help="the schedule's highest")
    parser.add_argument("--width", type=int, default=32, help="channels of the first stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="simulate in the compiler")
    arguments = parser.parse_args(argv)
    result = train(arguments)
    print(f"{arguments.recipe}: test accuracy {result:.2%} (seed {arguments.seed})")
    return result


if __name__ == "__main__":
    main()
