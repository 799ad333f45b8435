"""Small HuggingFace encoders for tests: real architectures, a few thousand weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from qinductor import zoo


def tiny_bert(*, layers: int = 2, hidden: int = 64, seed: int = 0) -> nn.Module:
    """A BertModel of ``layers`` layers with the vocabulary of bert-base-uncased; eval mode."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * hidden,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BertModel(config).eval()


def save_tiny_bert(folder: Path, *, tokenizer: bool = True) -> Path:
    """Save :func:`tiny_bert`, with all-MiniLM's tokenizer unless told otherwise."""
    tiny_bert().save_pretrained(str(folder))
    if tokenizer:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(str(zoo.minilm_folder())).save_pretrained(str(folder))
    return folder
