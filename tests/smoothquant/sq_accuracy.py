"""What the accuracy tests measure, on any callable with the model's signature (compiled or not)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import qinductor
from qinductor import text, zoo
from qinductor.smoothquant import SmoothQuantConfig

BAR = 0.8185
"""STS-B test Spearman that an int8 model must reach; float32 measures 0.8203."""
CALIBRATION_SENTENCES = 64
"""The first sentences of the first 64 pairs of STS-B's training split."""
OUTLIER_ROWS = (0, 1, 2, 3)
OUTLIER_FACTOR = 30.0


def calibration_batches(loaded: zoo.Loaded) -> list[dict[str, Tensor]]:
    """Ragged batches of 16 sentences with their masks."""
    sentences = [first for first, _, _ in text.stsb("train")[:CALIBRATION_SENTENCES]]
    return [batch for _, batch in zoo.batches(loaded, sentences, batch_size=16)]


def planted(model: nn.Module) -> nn.Module:
    """Copy of a BERT with outlier channels in every attention output, the same function.

    Four rows of each value projection are multiplied by 30, the columns of the output projection
    that read them divided by it.
    """
    model = copy.deepcopy(model)
    rows = list(OUTLIER_ROWS)
    with torch.no_grad():
        for layer in model.encoder.layer:
            value, dense = layer.attention.self.value, layer.attention.output.dense
            value.weight[rows] *= OUTLIER_FACTOR
            value.bias[rows] *= OUTLIER_FACTOR
            dense.weight[:, rows] /= OUTLIER_FACTOR
    return model


def quantized(
    loaded: zoo.Loaded, activation: str, *, alpha: float | None = 0.5, outliers: bool = False
) -> nn.Module:
    """The int8 model, calibrated on :func:`calibration_batches`."""
    model = planted(loaded.model) if outliers else loaded.model
    config = SmoothQuantConfig(alpha=alpha, activation=activation)
    return qinductor.quantize_model(model, calibration_batches(loaded), config)


@torch.no_grad()
def padding_cosines(
    model: Any, loaded: zoo.Loaded, sentences: Sequence[str], width: int = 128, batch: int = 8
) -> Tensor:
    """Cosine between each sentence's embedding alone and in a batch padded to ``width``."""
    alone = torch.cat([zoo.embed(model, loaded, [s], batch_size=1) for s in sentences])
    rows = []
    for start in range(0, len(sentences), batch):
        padded = zoo.encode(loaded, sentences[start : start + batch], pad_to=width)
        assert padded["input_ids"].shape[1] == width
        hidden = model(**padded).last_hidden_state
        rows.append(zoo.mean_pooling(hidden, padded["attention_mask"]))
    return torch.nn.functional.cosine_similarity(alone, torch.cat(rows), dim=-1)
