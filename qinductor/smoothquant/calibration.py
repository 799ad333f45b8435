"""The state of a prepared model: observers, hooks, and what the batches have shown so far."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import CalibrationError
from .batches import check_keys, real_tokens, token_shape
from .config import ActivationRange, SmoothQuantConfig
from .dataflow import Analysis, Facts
from .observers import LinearObserver, real_rows
from .tracing import Recorder, parameter_names

CALIBRATION_ATTRIBUTE = "_qinductor_calibration"
"""Attribute of a prepared model that holds its :class:`Calibration`."""


def layers_of_parameters(model: nn.Module) -> dict[str, str | None]:
    """Owning module of each parameter; None for a parameter that several modules share."""
    owners: dict[str, list[str]] = {}
    first_name: dict[int, str] = {}
    for layer, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full = first_name.setdefault(id(parameter), f"{layer}.{name}" if layer else name)
            owners.setdefault(full, []).append(layer)
    return {name: layers[0] if len(layers) == 1 else None for name, layers in owners.items()}


class Calibration:
    """Observers of a prepared model, and the hooks that feed them.

    Args:
        model: the prepared model (the copy).
        config: its recipe.
        kept: names of Linears that stay in float, with the reason.

    Attributes:
        observers: by Linear name, filled by :meth:`watch`.
        facts: dataflow over all batches.
        pooled: Linears that only ever saw one row a sequence.
        batches: number of batches that ran through to the end.
    """

    def __init__(self, model: nn.Module, config: SmoothQuantConfig, kept: dict[str, str]) -> None:
        self.config = config
        self.kept = kept
        self.observers: dict[str, LinearObserver] = {}
        self.facts = Facts()
        self.batches = 0
        self._pooled: dict[str, bool] = {}
        self._mask: Tensor | None = None
        self._grid: torch.Size | None = None
        self._recorder: Recorder | None = None
        self._layers = layers_of_parameters(model)
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._end, always_call=True),
        ]

    @property
    def pooled(self) -> set[str]:
        """Linears that only ever saw one row a sequence of several tokens."""
        return {name for name, only in self._pooled.items() if only}

    def watch(self, name: str, linear: nn.Linear) -> None:
        """Attach an observer to a Linear."""
        sample = self.config.range_rule is not ActivationRange.MINMAX
        self.observers[name] = LinearObserver(sample)
        watcher = _Watcher(self, name)
        self._handles += [
            linear.register_forward_pre_hook(watcher.enter, with_kwargs=True),
            linear.register_forward_hook(watcher.leave, always_call=True),
        ]

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ------------------------------------------------------------ around one forward pass

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stop()
        if model.training:
            raise CalibrationError(
                "the prepared model is in training mode, whose dropout would distort the "
                "statistics. Call prepared.eval() before calibrating."
            )
        check_keys(model, kwargs)
        self._mask = real_tokens(model, args, kwargs)
        self._grid = token_shape(model, args, kwargs)
        self._recorder = Recorder(parameter_names(model))
        self._recorder.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, model: nn.Module, args: tuple[Any, ...], result: object) -> None:
        recorder = self._recorder
        self._stop()
        # The hook is called on the way out of an exception, too, with the result None.
        if recorder is None or result is None:
            return
        Analysis(self.facts, recorder.finish(result), self.observers, self._layers).run()
        self.batches += 1

    def _stop(self) -> None:
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._recorder = self._mask = self._grid = None

    # ------------------------------------------------------------ around one Linear

    def enter(self, name: str, x: Tensor) -> None:
        """Take in the input of a Linear.

        Raises:
            CalibrationError: it holds a NaN or an infinity.
        """
        if self._recorder is None:  # a part of the model was called by itself
            return
        self._recorder.inside.append(name)
        self._recorder.paused = True
        try:
            with torch.no_grad():
                rows = real_rows(x.detach(), self._mask)
                finite = self.observers[name].observe(rows)
            self._note_pooling(name, x)
        finally:
            self._recorder.paused = False
        if not finite:
            raise CalibrationError(
                f"the input of {name} holds NaN or infinity in a calibration batch. Look for the "
                "first batch whose float outputs are not finite, and remove or repair it."
            )

    def leave(self, name: str) -> None:
        """Note that a Linear is done."""
        if self._recorder is not None and self._recorder.inside[-1:] == [name]:
            self._recorder.inside.pop()

    def _note_pooling(self, name: str, x: Tensor) -> None:
        if self._grid is None or self._grid[-1] == 1:
            return  # with one token a sequence the two cannot be told apart
        sequences = self._grid.numel() // self._grid[-1]
        one_row_each = x.numel() // x.shape[-1] == sequences
        self._pooled[name] = one_row_each and self._pooled.get(name, True)


class _Watcher:
    """Hooks of one Linear: bound methods, so that copying the model copies them."""

    def __init__(self, calibration: Calibration, name: str) -> None:
        self._calibration = calibration
        self._name = name

    def enter(self, module: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("input")
        # What does not fit is left to the Linear itself, which names both shapes.
        if isinstance(x, Tensor) and x.shape[-1:] == (module.in_features,):
            self._calibration.enter(self._name, x)

    def leave(self, module: nn.Module, args: tuple[Any, ...], result: object) -> None:
        self._calibration.leave(self._name)
