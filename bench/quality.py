"""Does an int8 encoder still mean the same? Embedding fidelity, STS-B, Banking77."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import text, zoo


@dataclass(frozen=True)
class Fidelity:
    """How near the embeddings of the same texts are to the float model's.

    Attributes:
        mean, min: of the cosines between matching rows.
        rank_correlation: Spearman's, between the pairwise similarities of the texts.
    """

    mean: float
    min: float
    rank_correlation: float


def spearman(a: Tensor, b: Tensor) -> float:
    """Spearman's rank correlation of two 1-D tensors, ties at their mean rank."""
    from scipy.stats import spearmanr

    return float(spearmanr(a.numpy(), b.numpy()).statistic)


def fidelity(reference: Tensor, embeddings: Tensor) -> Fidelity:
    """Compare embeddings, both (N, H) with rows of length 1."""
    cosines = (reference * embeddings).sum(-1)
    upper = torch.triu_indices(len(reference), len(reference), offset=1)
    pairs = [(x @ x.T)[upper[0], upper[1]] for x in (reference, embeddings)]
    return Fidelity(float(cosines.mean()), float(cosines.min()), spearman(*pairs))


def stsb_spearman(model: Any, loaded: zoo.Loaded, split: str = "test") -> float:
    """Spearman of cosine similarities with STS-B's scores; mean pooling.

    Raises:
        CalibrationError: the data is absent.
    """
    rows = text.stsb(split)
    sentences = [first for first, _, _ in rows] + [second for _, second, _ in rows]
    embeddings = zoo.embed(model, loaded, sentences)
    similarity = (embeddings[: len(rows)] * embeddings[len(rows) :]).sum(-1)
    return spearman(similarity, torch.tensor([score for _, _, score in rows]))


class Banking77Head:
    """A logistic-regression head on embeddings, trained once on the float model's."""

    def __init__(self, embeddings: Tensor, labels: Sequence[str]) -> None:
        from sklearn.linear_model import LogisticRegression

        # C and iterations: scikit-learn's defaults stop short of convergence on 77 classes.
        self._head = LogisticRegression(C=10.0, max_iter=300)
        self._head.fit(embeddings.numpy(), labels)

    def accuracy(self, embeddings: Tensor, labels: Sequence[str]) -> float:
        """Share of texts whose intent is predicted, 0 to 1."""
        return float(self._head.score(embeddings.numpy(), labels))


def left_products(codes: Sequence[str]) -> list[str]:
    """Matrix products that Inductor's generated code leaves to library calls, by name.

    Attention's batched products (bmm, scaled_dot_product) are not counted: they multiply
    activations with each other and belong to no Linear.
    """
    import re

    call = re.compile(
        r"(?:extern_kernels|aten|torch\.ops\.\w+|op_\w+)\.?"
        r"\b((?:add)?mm|_int_mm|mkl_linear|_linear_pointwise|qlinear_pointwise|_mkl_linear|linear)\b"
        r"[\w.]*\("
    )
    return [
        match.group(1)
        for code in codes
        for line in code.splitlines()
        if not line.lstrip().startswith("#")
        for match in call.finditer(line)
    ]
