"""``with qinductor.simulate(model, spec):`` the spec around every call that the model makes.

Forward hooks on the modules say where a call happens, and a function mode sees it. Roundings of
gradients are autograd functions, so the backward pass needs no mode and no hook.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

from qinductor.compat import checkpoint_frame
from qinductor.errors import ConfigError

from .applying import Pass, perform
from .composite import perform_composite, plain_twin
from .handle import Place, Simulation, place_of
from .operations import form_of
from .spec import SimulationSpec


@dataclass
class Position:
    """Where a forward pass stands: its counters, and the modules that are being run."""

    run: Pass
    places: list[Place] = field(default_factory=list)
    recomputing: bool = False

    def copy(self) -> Position:
        """A position to resume from: the same step, and counters of its own."""
        run = Pass(self.run.simulation, self.run.seed, self.run.step, self.run.rank)
        run.calls = self.run.calls.copy()
        return Position(run, self.places[-1:], recomputing=True)


class Handle(Simulation):
    """The simulation of one model; a context manager, and what ``options`` may name.

    Inside ``with handle:`` the model's forward passes are simulated, and their backward passes,
    wherever those run. Classes, state_dict and parameters of the model stay as they are.
    """

    def __init__(self, model: nn.Module, spec: SimulationSpec) -> None:
        super().__init__(spec)
        self.model = _without_wrapper(model)
        self._places = {
            module: place_of(path, module) for path, module in self.model.named_modules()
        }
        self.root = self._places[self.model]
        self._positions: list[Position] = []
        self._hooks: list[Any] = []
        self._modes: list[_Mode] = []
        self._checked = False
        self._check_names()

    def _check_names(self) -> None:
        """Refuse rules whose module or type the model does not have, before anything runs."""
        for rule in self.spec.rules:
            reached = any(rule.names(p.path, p.types) for p in self._places.values())
            if not (rule.optional or reached):
                from .matching import nothing_matches

                raise ConfigError(nothing_matches(rule, list(self._places.values()), set()))

    def __enter__(self) -> Self:
        """Install hooks and the mode."""
        self._enter()
        return self

    def __exit__(self, *error: object) -> None:
        """Remove them."""
        self._leave()

    def _enter(self) -> None:
        if not self._modes:
            for module, place in self._places.items():
                pre, post = _hook(self._enter_module, place), _hook(self._leave_module, place)
                self._hooks.append(module.register_forward_pre_hook(pre, prepend=True))
                self._hooks.append(module.register_forward_hook(post, always_call=True))
        mode = _Mode(self)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._modes.append(mode)

    def _leave(self) -> None:
        self._modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if not self._modes:
            while self._hooks:
                self._hooks.pop().remove()

    @property
    def position(self) -> Position | None:
        """Where the running forward pass stands; None outside of one."""
        return self._positions[-1] if self._positions else None

    def _enter_module(self, place: Place, traced: bool, out: object) -> None:
        if traced:
            raise ConfigError(
                "a model that is being simulated was compiled. Call it outside of `with "
                "qinductor.simulate(...)`, or simulate in the compiler: torch.compile(model, "
                "backend='qsim', options={'simulate': handle})."
            )
        _refuse_reentrant(self.position, place)
        if self.position is None:
            run = Pass(self, self.seed, self.begin(), data_parallel_rank())
            self._positions.append(Position(run))
        self._note_checkpoint()
        assert self.position is not None
        self.position.places.append(place)

    def _leave_module(self, place: Place, traced: bool, out: object) -> None:
        position = self.position
        if position is None or not position.places:
            return
        position.places.pop()
        if position.places or position.recomputing:
            return
        self._positions.pop()
        if out is not None and not self._checked:
            self._checked = True
            self.check_matched(self._places.values(), position.run.calls)

    def _note_checkpoint(self) -> None:
        """Let what a checkpoint recomputes later be simulated as it is now."""
        frame = checkpoint_frame()
        if frame is None or isinstance(frame.recompute_fn, _Recompute):
            return
        assert self.position is not None
        frame.recompute_fn = _Recompute(self, self.position.copy(), frame.recompute_fn)

    def perform(self, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call that the model makes."""
        position = self.position
        form = form_of(callee)
        if position is None or not position.places:
            if form is not None:
                _refuse_reentrant(position, None)
            return callee(*args, **kwargs)
        if form is None:
            twin = plain_twin(callee)
            if twin is None:
                return callee(*args, **kwargs)
            with self._modes[-1]:
                return twin(*args, **kwargs)
        self._note_checkpoint()
        place = position.places[-1]
        if not form.operands:
            return perform_composite(position.run, place, form, callee, args, kwargs)
        return perform(position.run, place, form, callee, args, kwargs)


def _hook(function: Callable[[Place, bool, object], None], place: Place) -> Callable[..., None]:
    """A forward hook that tells ``function`` whether Dynamo traces it: it runs all the same."""
    untraced = torch.compiler.disable(function)

    def hook(module: nn.Module, args: object, out: object = None) -> None:
        untraced(place, torch.compiler.is_compiling(), out)

    return hook


class _Mode(TorchFunctionMode):
    """Shows the handle every torch function that is called."""

    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self.handle = handle

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.handle.perform(func, args, kwargs or {})


@dataclass
class _Recompute:
    """A checkpoint's function, run again where the forward pass stood when it first ran."""

    handle: Handle
    position: Position
    function: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handle = self.handle
        handle._enter()
        handle._positions.append(self.position.copy())
        try:
            return self.function(*args, **kwargs)
        finally:
            handle._positions.pop()
            handle._leave()


_HANDLES: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Handle]] = weakref.WeakKeyDictionary()


def handle_of(model: nn.Module) -> Handle | None:
    """The handle that :func:`simulate` made last for a model; None where there is none."""
    found = _HANDLES.get(getattr(model, "_orig_mod", model))
    return None if found is None else found()


def simulate(model: nn.Module, spec: SimulationSpec) -> Handle:
    """Simulate a spec on a model: ``with qinductor.simulate(model, spec) as handle: ...``.

    Every outermost forward pass inside the block is simulated, with its backward pass, and counts
    one step. ``handle.state_dict()`` holds the seed and the step. The same handle, or the spec, is
    what ``torch.compile(model, backend="qsim", options={"simulate": ...})`` takes.

    Args:
        model: any module; its classes, hooks, parameters and state_dict stay as they are.
        spec: the rules.

    Raises:
        ConfigError: a rule names no module of the model (at once) or no operation that ran (after
            the first forward pass); the model is compiled already.
    """
    handle = Handle(model, spec)
    _HANDLES[model] = weakref.ref(handle)
    return handle


def _without_wrapper(model: nn.Module) -> nn.Module:
    if hasattr(model, "_orig_mod"):
        raise ConfigError(
            "simulate() was given a compiled model. Give it the model itself, or compile with "
            "torch.compile(model, backend='qsim', options={'simulate': spec})."
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    return model


def data_parallel_rank() -> int:
    """This process's rank; 0 where nothing is distributed."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return 0


def _refuse_reentrant(position: Position | None, place: Place | None) -> None:
    """The reentrant checkpoint says neither what it recomputes nor when."""
    if position is not None or torch._C._current_graph_task_id() == -1:
        return
    node = torch._C._current_autograd_node()
    if node is not None and node.name() == "CheckpointFunctionBackward":
        where = f" (module {place.path!r})" if place else ""
        raise ConfigError(
            f"a checkpoint with use_reentrant=True cannot be simulated{where}: it does not tell "
            "which forward pass it recomputes. Use torch.utils.checkpoint.checkpoint(..., "
            "use_reentrant=False)."
        )
