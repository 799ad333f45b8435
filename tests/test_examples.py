"""The training examples run: every recipe, their own data and a folder of torchvision's."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in ("cifar10", "train_vgg", "train_transformer"):
        sys.modules.pop(name, None)


@pytest.fixture
def batches(tmp_path: Path) -> Path:
    """Sixty images in torchvision's layout: the class is the brightness."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    generator = numpy.random.default_rng(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        labels = generator.integers(0, 10, 10)
        data = (labels[:, None] * 25 + generator.integers(0, 9, (10, 3072))).astype("uint8")
        stored = {b"data": data, b"labels": labels.tolist()}
        (folder / name).write_bytes(pickle.dumps(stored))
    return tmp_path


RECIPES = ("fp32", "fp16", "block8", "wage", "swalp", "ibm8", "fixed8", "fixed8_nearest")


def test_every_recipe_is_tested(example) -> None:
    assert tuple(example("train_vgg").RECIPES) == RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
def test_vgg(example, batches: Path, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--epochs", "1", "--batch", "25", "--width", "4", "--lr", "0.02"]
    got = example("train_vgg").main(["--recipe", recipe, "--data", str(batches), *options])
    assert 0 <= got <= 1 and f"{recipe}: test accuracy" in capsys.readouterr().out
    again = example("train_vgg").main(["--recipe", recipe, "--data", str(batches), *options])
    assert again == got


def test_real_images(example, data_dir: Path) -> None:
    archive = data_dir / "cifar10" / "cifar10_jpeg_10k_2k.npz"
    if not archive.is_file():
        pytest.skip(f"no {archive}")
    train, test = example("cifar10").load(data_dir / "cifar10", train=2000)
    assert train.images.shape == (2000, 3, 32, 32) and test.images.shape == (2000, 3, 32, 32)
    assert set(train.labels.tolist()) == set(range(10))
    assert abs(float(train.images.mean())) < 0.1
    assert train.labels[:20].unique().numel() > 3  # not ordered by class


def test_no_data_is_named(example, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Give --data"):
        example("cifar10").load(tmp_path)


@pytest.mark.parametrize("preset", ["fp8", "mxfp4"])
def test_transformer(example, tmp_path: Path, preset: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 200)
    size = ["--width", "16", "--layers", "1", "--span", "8", "--batch", "8", "--steps", "30"]
    torch.manual_seed(0)
    loss = example("train_transformer").main(["--preset", preset, "--text", str(text), *size])
    assert loss < 2.0  # ln 8 = 2.08 is chance
