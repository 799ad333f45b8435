"""The rounding rule on tensors: the meaning of every quantizer, and the form without a compiler."""

from __future__ import annotations

import torch
from torch import Tensor

from .carrier import WORD32, WORD64, Carrier, Word
from .rounding import Lane


class AtenLanes:
    """Lanes that are int32 and int64 tensors."""

    def where(self, condition: Lane, a: Lane, b: Lane) -> Lane:
        """torch.where, also for two ints."""
        if not isinstance(a, Tensor) and not isinstance(b, Tensor):
            # int32 promotes to int64 where it meets one; only 64-bit words have larger constants.
            small = max(abs(a), abs(b)) < 2**31
            return condition.to(torch.int32 if small else torch.int64) * (a - b) + b
        return torch.where(condition, a, b)

    def minimum(self, a: Lane, b: Lane) -> Lane:
        """Elementwise minimum."""
        if not isinstance(a, Tensor):
            a, b = b, a
        return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp(max=b)

    def maximum(self, a: Lane, b: Lane) -> Lane:
        """Elementwise maximum."""
        if not isinstance(a, Tensor):
            a, b = b, a
        return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp(min=b)

    def wide(self, a: Lane) -> Lane:
        """To int64."""
        return a.to(torch.int64)

    def narrow(self, a: Lane, word: Word) -> Lane:
        """To the word's integer."""
        return a.to(word.int_dtype)

    def float_bits(self, a: Lane, word: Word) -> Lane:
        """Integer to float to bits."""
        return a.to(word.float_dtype).view(word.int_dtype)


LANES = AtenLanes()


def to_bits(x: Tensor, carrier: Carrier) -> Tensor:
    """Bits of x widened to the carrier's word."""
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).to(torch.int32) << 16
    return x.to(carrier.word.float_dtype).view(carrier.word.int_dtype)


def from_bits(bits: Tensor, carrier: Carrier) -> Tensor:
    """The inverse, for bits of the carrier's values."""
    if carrier.dtype == torch.bfloat16:
        return (bits >> 16).to(torch.int16).view(torch.bfloat16)
    return bits.view(carrier.word.float_dtype).to(carrier.dtype)


def left_aligned(u: Tensor, random_bits: int, word: Word) -> Tensor:
    """u·2^(32−r) as the rule takes it: int32 (wrapped) or non-negative int64."""
    aligned = u << (32 - random_bits)
    if word is WORD64:
        return aligned
    assert word is WORD32
    return torch.where(aligned >= 2**31, aligned - 2**32, aligned).to(torch.int32)
