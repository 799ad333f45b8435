"""Attention whose result for a token does not depend on padding, and how a model gets it.

An int8 model amplifies the last bit: scaled_dot_product_attention sums in another order when the
batch is padded further, results differ by 1e-6, somewhere a code flips, and the rounding errors of
all later layers come out anew. all-MiniLM-L6-v2's embedding of an STS-B sentence, alone and padded
to 128, then had a cosine of 0.998. With queries and keys filled up to multiples of 16, always under
a mask, torch's CPU kernel adds the same numbers in the same order, whatever the padding (its vector
lanes are full, and masked keys add exact zeros), so that all bits agree.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops as ops  # defines the library that this file adds an operator to

BLOCK = 16
"""Queries and keys are filled up to a multiple of this: float32 lanes of a 512-bit register."""
NAME = "qinductor_sdpa"
"""Name of this attention among those of transformers."""

_lib = torch.library.Library("qinductor", "FRAGMENT")
_lib.define(
    "padded_sdpa(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Scaled dot-product attention, the same bits however far a batch is padded.

    Args:
        query: (B, H, S, D) float.
        key: (B, H, T, D).
        value: (B, H, T, E).
        mask: bool, True where a query may see a key, or float, added to the scores; broadcastable
            to (B, H, S, T). None: every query sees every key.
        scale: factor of the scores.

    Returns:
        (B, H, S, E), laid out as (B, S, H, E).
    """
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones((1, 1, 1, keys), dtype=torch.bool, device=query.device)
    more_queries, more_keys = -queries % BLOCK, -keys % BLOCK
    if more_keys:
        blocked: float = False if mask.dtype is torch.bool else float("-inf")
        mask = F.pad(mask.expand(*mask.shape[:-1], keys), (0, more_keys), value=blocked)
        key, value = (F.pad(t, (0, 0, 0, more_keys)) for t in (key, value))
    if more_queries:
        query = F.pad(query, (0, 0, 0, more_queries))
        if mask.shape[-2] != 1:
            # Rows that nobody reads; they see what the last real query sees.
            last = mask[..., -1:, :].expand(*mask.shape[:-2], more_queries, mask.shape[-1])
            mask = torch.cat([mask, last], dim=-2)
    y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return y[:, :, :queries].transpose(1, 2).contiguous().transpose(1, 2)


_lib.impl("padded_sdpa", attention, "CompositeExplicitAutograd")


def _fake(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    batch, heads, queries, _ = query.shape
    return query.new_empty((batch, queries, heads, value.shape[-1])).transpose(1, 2)


torch.library.register_fake("qinductor::padded_sdpa", _fake, lib=_lib)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shapes = [list(t.shape) for t in inputs[:3]]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse = torch.ops.qinductor.no_gradient
    return (*(refuse(grad, "qinductor::padded_sdpa", shape) for shape in ctx.shapes), None, None)


torch.library.register_autograd("qinductor::padded_sdpa", _backward, setup_context=_setup, lib=_lib)


# ---------------------------------------------------------------- transformers


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: as its own sdpa function, which takes whatever is not plain."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    same_heads = key.shape[1] == query.shape[1]
    special = any(kwargs.get(name) is not None for name in ("position_bias", "softcap"))
    if dropout or special or not same_heads or (causal and attention_mask is None):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
            is_causal=is_causal, **kwargs,
        )  # fmt: skip
        return result
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    y = torch.ops.qinductor.padded_sdpa(query, key, value, attention_mask, scale)
    return y.transpose(1, 2), None


def register() -> None:
    """Make :data:`NAME` known to transformers; its masks are those of sdpa."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def use_padding_invariant_attention(model: nn.Module) -> None:
    """Switch every HuggingFace model in ``model`` from sdpa to :data:`NAME`, where it can.

    A model that uses another attention ("eager", or code of its own) keeps it.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return
    for module in model.modules():
        if (
            isinstance(module, transformers.PreTrainedModel)
            and module.config._attn_implementation == "sdpa"
        ):
            register()
            module.set_attn_implementation(NAME)
