"""Attention that padding does not touch, bit for bit, and how a converted model gets it."""

from __future__ import annotations

import pytest
import torch
from models import tiny_bert
from torch import Tensor
from torch.nn import functional as F

import qinductor
from qinductor.errors import BackwardThroughInt8Error
from qinductor.smoothquant import attention

HEADS = 3


def _inputs(tokens: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shape = (1, tokens, HEADS, dim)
    q, k, v = (torch.randn(shape, generator=generator).transpose(1, 2) for _ in range(3))
    return q, k, v


def _padded(tensors: tuple[Tensor, ...], batch: int, width: int) -> tuple[Tensor, ...]:
    """The tokens as row 0 of a batch of noise, padded with noise."""
    made = []
    for tensor in tensors:
        noise = torch.randn(batch, width, HEADS, tensor.shape[-1]).transpose(1, 2)
        noise[0, :, : tensor.shape[2]] = tensor[0]
        made.append(noise)
    return tuple(made)


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 14, 16, 31, 64, 100])
@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("kind", ["bool", "float", "full"])
def test_padding_changes_no_bit(tokens: int, dim: int, kind: str) -> None:
    qkv = _inputs(tokens, dim)
    expected = torch.ops.qinductor.padded_sdpa(*qkv, None, dim**-0.5)
    for batch, width in ((1, tokens), (2, tokens + 1), (5, tokens + 13), (4, 128), (2, 512)):
        mask = torch.zeros(batch, 1, 1, width, dtype=torch.bool)
        mask[0, ..., :tokens] = True
        mask[1:, ..., : width // 2 + 1] = True
        if kind == "full":
            mask = mask.expand(batch, 1, width, width)
        if kind == "float":
            mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, float("-inf"))
        y = torch.ops.qinductor.padded_sdpa(*_padded(qkv, batch, width), mask, dim**-0.5)
        assert torch.equal(y[0, :, :tokens], expected[0])


@pytest.mark.parametrize("shape", [(1, 1), (7, 7), (16, 16), (5, 33)])
@pytest.mark.parametrize("masked", [False, True])
def test_is_scaled_dot_product_attention(shape: tuple[int, int], masked: bool) -> None:
    queries, keys = shape
    q, k, v = (
        torch.randn(2, 4, queries, 32),
        torch.randn(2, 4, keys, 32),
        torch.randn(2, 4, keys, 32),
    )
    mask = torch.rand(2, 1, queries, keys) > 0.3 if masked else None
    if mask is not None:
        mask[..., 0] = True
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.2)
    torch.testing.assert_close(torch.ops.qinductor.padded_sdpa(q, k, v, mask, 0.2), expected)


@pytest.mark.parametrize("queries", [5, 16])
def test_opcheck_and_layout(queries: int) -> None:
    q, k, v = (torch.randn(2, queries, 4, 32).transpose(1, 2) for _ in range(3))
    mask = torch.ones(2, 1, 1, queries, dtype=torch.bool)
    torch.library.opcheck(torch.ops.qinductor.padded_sdpa, (q, k, v, mask, 0.2))
    assert torch.ops.qinductor.padded_sdpa(q, k, v, None, 0.2).transpose(1, 2).is_contiguous()


def test_has_no_gradient() -> None:
    q = torch.randn(1, 2, 3, 8, requires_grad=True)
    y = torch.ops.qinductor.padded_sdpa(q, q, q, None, 1.0)
    with pytest.raises(BackwardThroughInt8Error, match="qinductor::padded_sdpa"):
        y.sum().backward()


def _batch(width: int) -> dict[str, Tensor]:
    ids = torch.full((3, width), 7)
    mask = torch.zeros(3, width, dtype=torch.int64)
    for row, length in enumerate((5, 9, 3)):
        ids[row, :length] = torch.arange(length) + 100 * row
        mask[row, :length] = 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("activation", ["static", "dynamic"])
def test_a_converted_model_gives_the_same_bits_alone_and_padded(activation: str) -> None:
    config = qinductor.SmoothQuantConfig(activation=activation)
    model = tiny_bert()
    qmodel = qinductor.quantize_model(model, [_batch(9)], config)
    assert qmodel.config._attn_implementation == attention.NAME
    assert model.config._attn_implementation == "sdpa"
    wide = qmodel(**_batch(40)).last_hidden_state
    for row, length in enumerate((5, 9, 3)):
        alone = {name: t[row : row + 1, :length] for name, t in _batch(9).items()}
        assert torch.equal(qmodel(**alone).last_hidden_state[0], wide[row, :length])


def test_another_attention_is_kept() -> None:
    model = tiny_bert()
    model.set_attn_implementation("eager")
    qmodel = qinductor.quantize_model(model, [_batch(9)])
    assert qmodel.config._attn_implementation == "eager"


def test_a_causal_model_still_is() -> None:
    from transformers import BertLMHeadModel

    config = tiny_bert().config
    config.is_decoder = True
    torch.manual_seed(0)
    model = BertLMHeadModel(config).eval()
    qmodel = qinductor.quantize_model(model, [_batch(9)])
    assert qmodel.config._attn_implementation == attention.NAME
    ids = torch.arange(12)[None] + 5
    changed = ids.clone()
    changed[0, -1] = 500
    with torch.no_grad():
        a, b = (qmodel(input_ids=i).logits for i in (ids, changed))
    assert torch.equal(a[0, :-1], b[0, :-1])
