"""A model that torchao itself converted to int8, taken over as QuantizedLinears.

The backend accepts such a model as it is. Taken over, each weight is packed once, outside the hot
path, and the model can be saved with :func:`qinductor.save`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConversionError
from ..ops import MAX_K, ZERO_POINT_S8
from .attention import use_padding_invariant_attention
from .eligibility import linears
from .linear import QuantizedLinear
from .memory import release_free_memory
from .sites import RECIPE_ATTRIBUTE, SITES_ATTRIBUTE, Fold, Site
from .steps import replace
from .torchao_api import Int8Tensor, MappingType, PerRow, PerTensor

DIVISOR = 127.5
"""torchao's symmetric mapping divides the largest magnitude by half of the 255 steps."""
MIN_SCALE = torch.finfo(torch.float32).eps
"""torchao's lower bound of a scale."""


def from_torchao(model: nn.Module) -> nn.Module:
    """Replace the int8 Linears that torchao made by QuantizedLinears, in place; return the model.

    Taken over are weights that are symmetric per row (or per tensor), with activations quantized
    dynamically per token or statically per tensor, with or without SmoothQuant's factor. Others
    stay as they are, with a reason. The integer arithmetic is the same, and so are codes and
    scales; only a static factor is folded into the quantizer's scale, where a code next to a
    rounding boundary can differ by one.

    Raises:
        ConversionError: no Linear of the model has such a weight.
    """
    found = linears(model)
    reasons = {name: _refusal(linear) for name, linear in found.items()}
    chosen = {name: linear for name, linear in found.items() if reasons[name] is None}
    if not chosen:
        listed = "; ".join(f"{name or 'the model'}: {why}" for name, why in reasons.items())
        raise ConversionError(
            f"{type(model).__name__} has no Linear that torchao made int8 in a form that can be "
            f"taken over. {listed or 'It has no Linear at all'}."
        )
    sites = [_site(name, linear, reasons[name]) for name, linear in found.items()]
    result = replace(model, chosen, lambda _, linear: _taken_over(linear))
    use_padding_invariant_attention(result)
    setattr(result, SITES_ATTRIBUTE, [site.to_dict() for site in sites])
    setattr(result, RECIPE_ATTRIBUTE, {"source": "torchao"})
    release_free_memory()
    return result.eval()


def _refusal(linear: nn.Linear) -> str | None:
    weight: Any = linear.weight.data
    if not isinstance(weight, Int8Tensor):
        kind = "float" if type(weight) is Tensor else f"a {type(weight).__name__}"
        return f"its weight is {kind}, not torchao's Int8Tensor"
    activation = weight.act_quant_kwargs
    if activation is None:
        return "only its weight is int8"
    if weight.ndim != 2 or weight.scale.numel() not in (1, weight.shape[0]):
        return "its weight's scale is neither per row nor per tensor"
    if weight.zero_point is not None and bool(weight.zero_point.any()):
        return "its weight has a zero point"
    if weight.reduce_range or activation.reduce_range:
        return "its range is reduced to 7 bits, which this package's kernels do not need"
    if weight.shape[1] > MAX_K:
        return f"{weight.shape[1]} inputs: above {MAX_K} the int32 sum could overflow"
    if weight.act_quant_scale is None:
        if not isinstance(activation.granularity, PerRow):
            return "its activation is quantized dynamically, but not per token"
        if activation.mapping_type is not MappingType.SYMMETRIC:
            return "its activation is quantized per token with a zero point"
    elif not isinstance(activation.granularity, PerTensor) or weight.act_quant_scale.numel() != 1:
        return "its activation is quantized statically, but not per tensor"
    return None


@torch.no_grad()
def _taken_over(linear: nn.Linear) -> QuantizedLinear:
    weight: Any = linear.weight.data
    codes: Tensor = weight.qdata
    w_scale = weight.scale.reshape(-1).float().expand(codes.shape[0]).clone()
    factor = None if weight.act_pre_scale is None else weight.act_pre_scale.reshape(-1).float()
    if weight.act_quant_scale is None:
        return QuantizedLinear(
            codes, w_scale, linear.bias, multiplier=factor, divisor=DIVISOR,
            min_scale=MIN_SCALE, dtype=weight.dtype,
        )  # fmt: skip
    x_scale = weight.act_quant_scale.reshape(()).float()
    zero = torch.tensor(ZERO_POINT_S8, dtype=torch.int32, device=codes.device)
    if weight.act_quant_kwargs.mapping_type is MappingType.ASYMMETRIC:
        zero = zero + weight.act_quant_zero_point.reshape(()).to(torch.int32)
    inverse = x_scale.reciprocal()
    return QuantizedLinear(
        codes, w_scale, linear.bias, x_scale=x_scale, x_zero_point=zero,
        x_inverse_scale=inverse if factor is None else inverse * factor, dtype=weight.dtype,
    )  # fmt: skip


def _site(name: str, linear: nn.Linear, reason: str | None) -> Site:
    n, k = linear.weight.shape
    if reason is not None:
        return Site(name, False, k, n, reason=reason)
    weight: Any = linear.weight.data
    static = weight.act_quant_scale is not None
    affine = static and weight.act_quant_kwargs.mapping_type is MappingType.ASYMMETRIC
    fold = Fold.QUANTIZER if static else Fold.MULTIPLY
    return Site(
        name,
        True,
        k,
        n,
        activation=("static u8" if affine else "static s8") if static else "dynamic s8 per token",
        group=(name,),
        fold=Fold.NONE if weight.act_pre_scale is None else fold,
        why=None if weight.act_pre_scale is None else "torchao folds no factor into a layer",
    )
