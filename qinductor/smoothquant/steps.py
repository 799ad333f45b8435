"""The two steps as torchao sees them: step configs and the handlers that ``quantize_`` calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from .calibration import Calibration
from .torchao_api import AOBaseConfig, quantize_, register_quantize_module_handler


@dataclass
class ObserveStep(AOBaseConfig):  # type: ignore[misc]  # torchao is untyped
    """Attach an observer to each Linear. ``names``: qualified names by ``id`` of the Linear."""

    calibration: Calibration
    names: Mapping[int, str]
    done: set[int] = field(default_factory=set)


@dataclass
class ReplaceStep(AOBaseConfig):  # type: ignore[misc]  # torchao is untyped
    """Put an int8 layer in the place of each Linear.

    ``quantize_`` visits a module once for each place it has; ``done`` makes it one int8 module.
    """

    make: Callable[[str, nn.Linear], nn.Module]
    names: Mapping[int, str]
    done: dict[int, nn.Module] = field(default_factory=dict)


@register_quantize_module_handler(ObserveStep)  # type: ignore[untyped-decorator]
def _observe(module: nn.Linear, config: ObserveStep) -> nn.Module:
    if id(module) not in config.done:
        config.done.add(id(module))
        config.calibration.watch(config.names[id(module)], module)
    return module


@register_quantize_module_handler(ReplaceStep)  # type: ignore[untyped-decorator]
def _replace(module: nn.Linear, config: ReplaceStep) -> nn.Module:
    if id(module) not in config.done:
        config.done[id(module)] = config.make(config.names[id(module)], module)
    return config.done[id(module)]


def observe(model: nn.Module, calibration: Calibration, linears: Mapping[str, nn.Linear]) -> None:
    """Attach observers to the given Linears of ``model``."""
    names = {id(linear): name for name, linear in linears.items()}
    step = ObserveStep(calibration, names)
    quantize_(model, step, filter_fn=lambda module, _: id(module) in names)


def replace(
    model: nn.Module,
    linears: Mapping[str, nn.Linear],
    make: Callable[[str, nn.Linear], nn.Module],
) -> nn.Module:
    """Put ``make(name, linear)`` in the place of the given Linears; return the model.

    The model returned is another object only where the model is itself a Linear.
    """
    names = {id(linear): name for name, linear in linears.items()}
    step = ReplaceStep(make, names)
    quantize_(model, step, filter_fn=lambda module, _: id(module) in names)
    # Of several places that one parent gives a module, quantize_ sees the first.
    for parent in list(model.modules()):
        for place, child in parent._modules.items():
            if id(child) in step.done:
                parent._modules[place] = step.done[id(child)]
    return step.done.get(id(model), model)
