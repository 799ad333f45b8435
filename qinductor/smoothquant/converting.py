"""convert: a calibrated model becomes an int8 one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CalibrationError, ConversionError
from ..ops import ZERO_POINT_S8
from .attention import use_padding_invariant_attention
from .calibration import CALIBRATION_ATTRIBUTE, Calibration
from .config import SmoothQuantConfig
from .eligibility import linears
from .folding import Decision, apply_fold, decide, group_factors, group_range
from .linear import QuantizedLinear
from .memory import release_free_memory
from .preparing import prepare
from .sites import RECIPE_ATTRIBUTE, SITES_ATTRIBUTE, Fold, Site
from .smoothing import quantize_weight, static_scale
from .steps import replace

Progress = Callable[[int, int | None], None]
"""Called after each batch with the number done and, where it is known, the number there is."""


@dataclass(frozen=True)
class SmoothedGroup:
    """A group of Linears, ready to be quantized.

    Attributes:
        decision: where its smoothing factors went.
        columns: factors that the weights' columns have still to be multiplied by, or None.
        buffers: scales of the input, as QuantizedLinear takes them; shared by the members.
    """

    decision: Decision
    columns: Tensor | None
    buffers: dict[str, Tensor]


def convert(prepared: nn.Module) -> nn.Module:
    """Turn a calibrated model into an int8 one, in place, and return it.

    The float weights of converted Linears are released group by group. What became of each Linear
    stays on the model, for the report. The result is in eval mode and needs no gradients.

    Raises:
        ConversionError: the model was not prepared, saw no batch, or is int8 already; or
            calibration has shown that none of its Linears can become int8.
    """
    calibration = _calibration(prepared)
    kept = _all_kept(prepared, calibration)
    calibration.detach()
    for parameter in prepared.parameters():
        parameter.requires_grad_(False)
    decisions: dict[str, Decision] = {}
    model = prepared
    for group in smoothed_groups(prepared, calibration, kept):
        found = {name: _linear(prepared, name) for name in group.decision.group}
        model = replace(prepared, found, functools.partial(_quantized, group))
        decisions |= dict.fromkeys(found, group.decision)
    sites = [
        _site(name, calibration, kept, decisions, model) for name in _names_in_order(calibration)
    ]
    delattr(prepared, CALIBRATION_ATTRIBUTE)
    _forbid_fused_encoder(model)
    use_padding_invariant_attention(model)
    setattr(model, SITES_ATTRIBUTE, [site.to_dict() for site in sites])
    setattr(model, RECIPE_ATTRIBUTE, {"source": "smoothquant", **calibration.config.to_dict()})
    release_free_memory()
    return model.eval()


def quantize_model(
    model: nn.Module,
    batches: Iterable[Any],
    config: SmoothQuantConfig | None = None,
    *,
    progress: Progress | None = None,
) -> nn.Module:
    """Prepare, calibrate and convert in one call; the float model is left alone.

    Args:
        model: the float model.
        batches: calibration batches: a mapping is passed as keywords, a tuple or list as
            positional arguments, a tensor as the only argument.
        config: the recipe; None for the default one.
        progress: called after each batch with (batches done, batches in all or None).

    Raises:
        CalibrationError: there are no batches, or one of them is not usable.
        ModelError, ConversionError, ConfigError: as :func:`prepare` and :func:`convert`.
    """
    prepared = prepare(model, config)
    total = len(batches) if isinstance(batches, Sized) else None
    done = 0
    with torch.no_grad():
        for batch in batches:
            if isinstance(batch, Mapping):
                prepared(**batch)
            elif isinstance(batch, tuple | list):
                prepared(*batch)
            else:
                prepared(batch)
            done += 1
            if progress is not None:
                progress(done, total)
    if done == 0:
        raise CalibrationError(
            "the calibration set is empty: give at least one batch, better 32 to 128 sentences "
            "like those the model will see."
        )
    return convert(prepared)


# ---------------------------------------------------------------- what can be converted


def _calibration(prepared: nn.Module) -> Calibration:
    calibration = getattr(prepared, CALIBRATION_ATTRIBUTE, None)
    if isinstance(calibration, Calibration):
        if calibration.batches == 0:
            raise ConversionError(
                "convert() before calibration: run the prepared model on representative batches "
                "first, `for batch in batches: prepared(**batch)`."
            )
        return calibration
    if getattr(prepared, SITES_ATTRIBUTE, None) is not None:
        raise ConversionError(
            "the model is int8 already: convert() turns a prepared model into the int8 one in "
            "place, so it can be called once. Use what it returned."
        )
    raise ConversionError(
        f"this {type(prepared).__name__} was not prepared. Call qinductor.prepare(model, config), "
        "run what it returns on calibration batches, then convert that."
    )


def _all_kept(model: nn.Module, calibration: Calibration) -> dict[str, str]:
    """Reasons of all Linears that stay in float, with those that calibration has shown."""
    kept = dict(calibration.kept)
    for name, observer in calibration.observers.items():
        if name not in calibration.facts.sources or observer.rows == 0:
            kept[name] = "calibration never reached it"
        elif name in calibration.facts.foreign:
            kept[name] = "its weight is also read from outside its own call"
        elif name in calibration.pooled:
            kept[name] = "reads one row a sequence: int8 would gain nothing and cost accuracy"
    if len(kept) == len(linears(model)):
        listed = "; ".join(f"{name or 'the model'}: {why}" for name, why in kept.items())
        raise ConversionError(f"no Linear of {type(model).__name__} can become int8. {listed}.")
    return kept


def _linear(model: nn.Module, name: str) -> nn.Linear:
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    return linear


# ---------------------------------------------------------------- smoothing and quantizing


@torch.no_grad()
def smoothed_groups(
    model: nn.Module, calibration: Calibration, kept: Mapping[str, str]
) -> Iterator[SmoothedGroup]:
    """Fold the smoothing factors into the float model, group after group, the last one first.

    After each group the float model computes the function it computed before; the caller may then
    replace the group's Linears.
    """
    config, facts = calibration.config, calibration.facts
    for members in reversed(facts.groups()):
        decision = decide(members, kept, facts, config, model)
        group = decision.group
        if not group:
            continue
        seen = group_range(group, calibration.observers)
        factors = None
        if config.alpha is not None:
            factors = group_factors(decision, config.alpha, seen, model)
            apply_fold(decision, factors, model)
        buffers: dict[str, Tensor] = {}
        at_input = decision.fold in (Fold.QUANTIZER, Fold.MULTIPLY)
        if config.is_static:
            samples = [s.data for n in group if (s := calibration.observers[n].sample) is not None]
            rows = [data for data in samples if data is not None]
            by = torch.ones_like(seen.low) if factors is None else factors
            scale = static_scale(config, seen.low, seen.high, by, torch.cat(rows) if rows else None)
            by_channel = scale.scale * factors if at_input and factors is not None else scale.scale
            buffers = {
                "x_scale": scale.scale,
                "x_inverse_scale": by_channel.reciprocal(),
                "x_zero_point": scale.zero_point,
            }
        else:
            zero_point = torch.tensor(ZERO_POINT_S8, dtype=torch.int32, device=seen.low.device)
            buffers = {"x_zero_point": zero_point}
            if at_input and factors is not None:
                buffers["multiplier"] = factors.reciprocal()
        yield SmoothedGroup(decision, factors if at_input else None, buffers)


@torch.no_grad()
def _quantized(group: SmoothedGroup, name: str, linear: nn.Linear) -> QuantizedLinear:
    weight = linear.weight.float()
    codes, w_scale = quantize_weight(weight if group.columns is None else weight * group.columns)
    return QuantizedLinear(
        codes,
        w_scale,
        linear.bias,
        x_scale=group.buffers.get("x_scale"),
        x_inverse_scale=group.buffers.get("x_inverse_scale"),
        x_zero_point=group.buffers.get("x_zero_point"),
        multiplier=group.buffers.get("multiplier"),
        dtype=linear.weight.dtype,
    )


def _forbid_fused_encoder(model: nn.Module) -> None:
    """Make nn.TransformerEncoderLayer call its Linears.

    Its fast path hands their weights to one fused float operator instead; with an int8 Linear that
    would unpack the weight at every call, and quietly compute in float.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(
            isinstance(child, QuantizedLinear) for child in module.children()
        ):
            module.activation_relu_or_gelu = 0


# ---------------------------------------------------------------- what became of each Linear


def _names_in_order(calibration: Calibration) -> list[str]:
    order = calibration.facts.order
    rest = [n for n in (*calibration.observers, *calibration.kept) if n not in order]
    return [*order, *rest]


def _site(
    name: str,
    calibration: Calibration,
    kept: Mapping[str, str],
    decisions: Mapping[str, Decision],
    model: nn.Module,
) -> Site:
    layer: Any = model.get_submodule(name)
    if name in kept:
        return Site(name, False, layer.in_features, layer.out_features, reason=kept[name])
    config, decision = calibration.config, decisions[name]
    if config.is_static:
        activation = "static s8" if config.symmetric else "static u8"
    else:
        activation = "dynamic s8 per token"
    return Site(
        name,
        True,
        layer.in_features,
        layer.out_features,
        activation=activation,
        group=decision.group,
        fold=decision.fold,
        folded_into=decision.into,
        why=decision.why,
    )
