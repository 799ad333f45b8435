"""The operator ``torch.ops.qinductor.attention``: what it means.

Attention between int8 projections: bfloat16 queries, keys and values, float32 scores, softmax and
sums, probabilities rounded to bfloat16 before they weight the values:

    score = fl(q . k) * scale + mask          float32
    e     = exp(score - max score)            float32
    out   = sum_j bf16(e_j) v_j / sum_j e_j   float32, then rounded to out_dtype or quantized

A row whose keys are all masked gives zeros. A template may sum in another order; its result differs
from this body by at most a few float32 roundings and, where a probability lies at a rounding
boundary of bfloat16, by 2**-9 of that probability.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import ConfigError
from .ops import TAGS, _has_shape, quantize, register_refusal

_lib = torch.library.Library("qinductor", "FRAGMENT")
_lib.define(
    "attention(Tensor q, Tensor k, Tensor v, int heads, float scale, Tensor? mask=None, "
    "bool causal=False, ScalarType out_dtype=float, Tensor? out_inverse_scale=None, "
    "Tensor? out_zero_point=None) -> Tensor",
    tags=TAGS,
)


EXP2_COEFFICIENTS = (1.0, 0.69312418, 0.24024038, 0.055906627, 0.0095853824)
"""2**r for |r| <= 1/2, lowest power first: of the polynomials that are exact at 0, the one with the
least largest relative error, 2.9e-6. For kernels that need no more than bfloat16 probabilities."""


MAX_HEAD_SIZE = 256
"""Longest head that the kernel takes: its sums of one row lie on the stack."""


def has_kernel(head_size: object) -> bool:
    """True if the kernel takes heads of this size: a known one, even, not too long."""
    return isinstance(head_size, int) and head_size % 2 == 0 and head_size <= MAX_HEAD_SIZE


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    out_dtype: torch.dtype = torch.float32,
    out_inverse_scale: Tensor | None = None,
    out_zero_point: Tensor | None = None,
) -> Tensor:
    """Multi-head attention on tensors whose heads lie side by side.

    Args:
        q: bfloat16 (B, Sq, heads * D).
        k: bfloat16 (B, Sk, heads * D).
        v: bfloat16 (B, Sk, heads * D).
        heads: number of heads.
        scale: factor of the scores.
        mask: float, added to the scores, or bool, True where a key is seen; broadcasts to
            (B, heads, Sq, Sk).
        causal: query i sees the keys 0 … i.
        out_dtype: float32, bfloat16 or uint8.
        out_inverse_scale: as in :func:`qinductor.ops.quantize`; with uint8 only.
        out_zero_point: likewise.

    Returns:
        ``out_dtype`` (B, Sq, heads * D).
    """
    _check(q, k, v, heads, out_dtype)
    split = (q.shape[0], -1, heads, q.shape[-1] // heads)
    qh, kh, vh = (t.float().view(split).transpose(1, 2) for t in (q, k, v))
    scores = qh @ kh.transpose(-1, -2) * scale
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    top = scores.amax(dim=-1, keepdim=True)
    e = torch.exp(scores - torch.where(top == -torch.inf, 0.0, top))
    total = e.sum(dim=-1, keepdim=True)
    out = (e.bfloat16().float() @ vh) * torch.where(total == 0, 0.0, 1 / total)
    out = out.transpose(1, 2).reshape(q.shape)
    if out_dtype is torch.uint8:
        assert out_inverse_scale is not None and out_zero_point is not None
        return quantize(out, out_inverse_scale, out_zero_point)
    return out.to(out_dtype)


def _check(q: Tensor, k: Tensor, v: Tensor, heads: int, out_dtype: torch.dtype) -> None:
    if {q.dtype, k.dtype, v.dtype} != {torch.bfloat16} or q.shape[-1] % heads:
        raise ConfigError(
            f"attention takes bfloat16 (B, S, heads * D) with heads={heads}; got "
            + ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in (q, k, v))
            + ". Convert with .bfloat16() and put the heads side by side."
        )
    for name, tensor in (("k", k), ("v", v)):
        shape = (q.shape[0], k.shape[1], q.shape[2])
        if not _has_shape(tensor, shape):
            raise ConfigError(f"{name} has shape {tuple(tensor.shape)}; it has to be {shape}.")
    valid = (torch.float32, torch.bfloat16, torch.uint8)
    if out_dtype not in valid:
        raise ConfigError(f"out_dtype={out_dtype} is not one of {', '.join(map(str, valid))}.")


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    out_dtype: torch.dtype = torch.float32,
    out_inverse_scale: Tensor | None = None,
    out_zero_point: Tensor | None = None,
) -> Tensor:
    _check(q, k, v, heads, out_dtype)
    return q.new_empty(q.shape, dtype=out_dtype)


_lib.impl("attention", attention, "CompositeExplicitAutograd")
torch.library.register_fake("qinductor::attention", _fake, lib=_lib)
register_refusal("attention", (0, 1, 2), _lib)
