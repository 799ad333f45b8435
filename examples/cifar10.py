"""CIFAR-10 as tensors, from a folder of yours or from the project's data folder.

A folder holds either torchvision's ``cifar-10-batches-py`` (``data_batch_1`` … ``test_batch``) or a
``cifar10_*.npz`` with the images as JPEG. Without one, ``cifar10`` in the folder that the variable
``QINDUCTOR_DATA`` names is read, else in ``shared/data`` beside the checkout.
"""

from __future__ import annotations

import io
import itertools
import pickle
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from qinductor.text import data_folder

MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Split(NamedTuple):
    """Images (N, 3, 32, 32) float32, normalised; labels (N,) int64."""

    images: Tensor
    labels: Tensor


def load(folder: Path | None = None, *, train: int | None = None) -> tuple[Split, Split]:
    """(training, test) images; ``train``: this many of the former, drawn with a fixed seed.

    Raises:
        FileNotFoundError: the folder holds neither form of the data.
    """
    if folder is None:
        found = data_folder()
        folder = found / "cifar10" if found else Path("cifar10")
    batches = next((p.parent for p in folder.rglob("data_batch_1")), None)
    archive = next(iter(sorted(folder.glob("*cifar10*.npz"))), None)
    if batches is not None:
        first = _pickled([batches / f"data_batch_{i}" for i in range(1, 6)])
        both = first, _pickled([batches / "test_batch"])
    elif archive is not None:
        with numpy.load(archive) as data:
            both = _jpegs(data, "train"), _jpegs(data, "test")
    else:
        raise FileNotFoundError(
            f"no CIFAR-10 in {folder}: neither cifar-10-batches-py nor cifar10_*.npz. Give --data."
        )
    (images, labels), test = both
    # What is stored may be ordered by class.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:train]
    return _normalised(images[order], labels[order]), _normalised(*test)


def _pickled(paths: list[Path]) -> tuple[Tensor, Tensor]:
    # The official files are pickles: read only what you trust.
    parts = [pickle.loads(p.read_bytes(), encoding="bytes") for p in paths]
    images = numpy.concatenate([p[b"data"] for p in parts]).reshape(-1, 3, 32, 32)
    return torch.from_numpy(images), torch.tensor([y for p in parts for y in p[b"labels"]])


def _jpegs(data: numpy.lib.npyio.NpzFile, split: str) -> tuple[Tensor, Tensor]:
    from PIL import Image

    raw, offsets = data[f"{split}_jpeg"].tobytes(), data[f"{split}_off"]
    images = numpy.stack([
        numpy.asarray(Image.open(io.BytesIO(raw[a:b])).convert("RGB"))
        for a, b in itertools.pairwise(offsets)
    ])  # fmt: skip
    return torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(data[f"{split}_y"])


def _normalised(images: Tensor, labels: Tensor) -> Split:
    mean, deviation = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, DEVIATION))
    return Split((images.float() / 255 - mean) / deviation, labels.long())
