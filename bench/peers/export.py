"""A HuggingFace encoder as what exporters take: positional tensors in, one tensor out."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class HiddenState(nn.Module):
    """``model``'s last hidden state, as a function of ids and mask.

    The pooler, whose output nobody reads, falls away in an export.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """Return (B, S, H) of (B, S) ids and mask."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=False)[0]
