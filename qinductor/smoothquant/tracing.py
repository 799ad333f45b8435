"""Recording the dataflow of one forward pass, at the level of torch functions.

Calibration runs the float model anyway; a TorchFunctionMode beside it notes which tensor each call
read and made. The record answers what smoothing has to know: which Linears read the same tensor,
what made it, and who else reads it. Tensors are not kept alive; a number is written on each.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_MARK = "_qinductor_value"
_DATA_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag", "grad"})
_METADATA = frozenset(
    {
        "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset",
        "is_contiguous", "element_size", "get_device", "data_ptr", "untyped_storage",
        "is_floating_point", "is_complex", "is_same_size", "is_inference", "is_pinned",
        "is_shared", "requires_grad_", "__len__", "__hash__",
    }
)  # fmt: skip
_INPLACE = frozenset({"__setitem__", "set_"})
_run_numbers = itertools.count()


@dataclass(frozen=True)
class Ref:
    """Stands for a tensor argument in a recorded call."""

    value: int


@dataclass
class Value:
    """A tensor of the recorded pass: who made it (None: it came from outside) and who reads it."""

    shape: torch.Size
    floating: bool
    producer: int | None
    parameter: str | None = None
    readers: list[int] = field(default_factory=list)
    returned: bool = False


@dataclass
class Op:
    """A recorded call. ``args`` and ``kwargs`` hold a :class:`Ref` for every tensor.

    ``inside`` is the innermost watched module that the call was made in.
    """

    index: int
    function: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    inside: str | None


@dataclass
class Recording:
    """Values and calls of one forward pass, in order.

    ``aliased_writes``: some view was written in place, so that values may have changed unseen.
    """

    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    aliased_writes: bool = False

    def producer(self, value: int) -> Op | None:
        """Return the call that made a value, None for one from outside."""
        index = self.values[value].producer
        return None if index is None else self.ops[index]

    def readers(self, value: int) -> list[Op]:
        """Return the calls that read a value."""
        return [self.ops[index] for index in self.values[value].readers]


def tensors_in(tree: object) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, sets, mappings and dataclasses."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_in(item)
    elif isinstance(tree, list | tuple | set):
        for item in tree:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        yield from tensors_in(vars(tree))


class Recorder(TorchFunctionMode):
    """Writes a :class:`Recording` while it is the active mode.

    Args:
        parameters: names of the model's parameters and buffers by ``id``.
    """

    def __init__(self, parameters: Mapping[int, str]) -> None:
        super().__init__()
        self.recording = Recording()
        self.inside: list[str] = []
        self.paused = False
        self._run = next(_run_numbers)
        self._parameters = parameters
        # Tensors from outside (inputs, parameters) carry no mark; they are kept alive meanwhile.
        self._outside: dict[int, tuple[Tensor, int]] = {}

    # ------------------------------------------------------------ numbering

    def value_of(self, tensor: Tensor) -> int:
        """Return the number of a tensor, giving it one if it comes from outside."""
        mark = getattr(tensor, _MARK, None)
        if mark is not None and mark[0] == self._run:
            return int(mark[1])
        if id(tensor) in self._outside:
            return self._outside[id(tensor)][1]
        number = self._new(tensor, None)
        self.recording.values[number].parameter = self._parameters.get(id(tensor))
        self._outside[id(tensor)] = (tensor, number)
        return number

    def _new(self, tensor: Tensor, producer: int | None) -> int:
        self.recording.values.append(Value(tensor.shape, tensor.is_floating_point(), producer))
        return len(self.recording.values) - 1

    def _mark(self, tensor: Tensor, producer: int) -> int:
        number = self._new(tensor, producer)
        self._outside.pop(id(tensor), None)
        setattr(tensor, _MARK, (self._run, number))
        return number

    def _template(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return Ref(self.value_of(tree))
        if type(tree) in (list, tuple):
            return type(tree)(self._template(item) for item in tree)
        return tree

    # ------------------------------------------------------------ the mode

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", type(func).__name__)
        if self.paused or _is_metadata(func, name):
            return func(*args, **kwargs)
        inputs = [*tensors_in(args), *tensors_in(kwargs)]
        numbers = tuple(self.value_of(t) for t in inputs)
        result = func(*args, **kwargs)
        self._record(func, name, args, kwargs, inputs, numbers, result)
        return result

    def _record(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[Tensor],
        numbers: tuple[int, ...],
        result: Any,
    ) -> None:
        written = _written(name, args, kwargs, inputs)
        outputs = list(tensors_in(result))
        if written is None and len(outputs) == 1 and any(outputs[0] is t for t in inputs):
            return  # the very same tensor: dropout in eval mode, a cast or copy that is none
        index = len(self.recording.ops)
        template = self._template(args)
        keywords = {key: self._template(value) for key, value in kwargs.items()}
        for number in numbers:
            self.recording.values[number].readers.append(index)
        if written is not None:
            self.recording.aliased_writes |= written._base is not None
            outputs = [written, *(t for t in outputs if t is not written)]
        made = tuple(self._mark(t, index) for t in outputs)
        self.recording.ops.append(
            Op(
                index, func, name, template, keywords, numbers, made,
                self.inside[-1] if self.inside else None,
            )
        )  # fmt: skip

    def finish(self, result: object) -> Recording:
        """Note what the model returned, and hand the recording over."""
        for tensor in tensors_in(result):
            self.recording.values[self.value_of(tensor)].returned = True
        self._outside.clear()
        return self.recording


def _is_metadata(func: Callable[..., Any], name: str) -> bool:
    """Whether a call reads a tensor's shape, type or place, but none of its numbers."""
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _DATA_ATTRIBUTES
    return name in _METADATA


def _written(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor]
) -> Tensor | None:
    """Return the tensor that a call overwrites, if it does."""
    if isinstance(kwargs.get("out"), Tensor):
        out: Tensor = kwargs["out"]
        return out
    in_place = (
        name in _INPLACE
        or (name.endswith("_") and not name.endswith("__"))
        or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
        or kwargs.get("inplace") is True
    )
    return inputs[0] if in_place and inputs else None


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Names of parameters and buffers by ``id``; a shared one has its first name."""
    names: dict[int, str] = {}
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        names.setdefault(id(tensor), name)
    return names
