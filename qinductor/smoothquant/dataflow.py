"""What smoothing has to know about a model's dataflow, gathered over all calibration batches.

For every Linear: which Linears read the same tensor, what makes that tensor, and whether anything
else reads it. A fact that holds in one call only is dropped: a module that is used twice, or a
branch that only some batches take, can therefore never make a fold wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from .channels import Step, data_input, rows_of_channels
from .tracing import Op, Recording, Ref

NORMS = frozenset({"layer_norm", "rms_norm"})
_SAME_ROWS = frozenset(
    {
        "view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "contiguous", "clone",
        "squeeze", "unsqueeze", "dropout", "to", "float", "half", "bfloat16", "type_as",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """What makes the tensor that a group of Linears reads.

    Attributes:
        kind: "norm", "linear", or "other".
        module: the layer that can take the factor; "" for "other".
        rows: for "linear", the row of that layer for each channel of the tensor.
        why: for "other", why no layer can take the factor.
    """

    kind: str
    module: str = ""
    rows: tuple[int, ...] = ()
    why: str = ""


@dataclass
class Facts:
    """Everything gathered so far.

    Attributes:
        order: Linears in the order of their first call.
        sources: per Linear, the sources of its input over all calls.
        feeds: per layer that a fold might change, what each of its calls feeds: the Linears that
            read it through a foldable path, or the empty set if that is not all there is.
        foreign: layers whose parameters something else than their own call reads.
    """

    order: list[str] = field(default_factory=list)
    sources: dict[str, set[Source]] = field(default_factory=dict)
    feeds: dict[str, set[frozenset[str]]] = field(default_factory=dict)
    foreign: set[str] = field(default_factory=set)
    _parent: dict[str, str] = field(default_factory=dict)

    def root(self, name: str) -> str:
        """Representative of the group that a Linear belongs to."""
        parent = self._parent.setdefault(name, name)
        if parent == name:
            return name
        self._parent[name] = root = self.root(parent)
        return root

    def groups(self) -> list[tuple[str, ...]]:
        """Groups of Linears that share an input, in the order of their first calls."""
        members: dict[str, list[str]] = {}
        for name in self.order:
            members.setdefault(self.root(name), []).append(name)
        return [tuple(names) for names in members.values()]

    def join(self, names: Collection[str]) -> None:
        """Note that these Linears read one tensor."""
        first, *rest = names
        for name in rest:
            self._parent[self.root(name)] = self.root(first)


class Analysis:
    """Reads one recording into :class:`Facts`.

    Args:
        facts: where the findings go.
        recording: of one forward pass.
        candidates: Linears that are to become int8.
        layers: module that owns each parameter, by parameter name; a shared one maps to None.
    """

    def __init__(
        self,
        facts: Facts,
        recording: Recording,
        candidates: Collection[str],
        layers: Mapping[str, str | None],
    ) -> None:
        self._facts = facts
        self._recording = recording
        self._candidates = candidates
        self._layers = layers
        # Per norm or Linear call: the Linears it feeds through a foldable path.
        self._fed: dict[int, frozenset[str]] = {}

    def run(self) -> None:
        """Take in the recording."""
        self._note_foreign_readers()
        by_value: dict[int, list[str]] = {}
        for op in self._recording.ops:
            name = self.layer_of(op) if op.name == "linear" else None
            if name in self._candidates and name is not None and op.inside == name:
                by_value.setdefault(self.root_value(op.inputs[0]), []).append(name)
                if name not in self._facts.sources:
                    self._facts.order.append(name)
                    self._facts.sources[name] = set()
        for value, names in by_value.items():
            self._facts.join(names)
            source = self._source(value, frozenset(names))
            for name in names:
                self._facts.sources[name].add(source)
        for op in self._recording.ops:
            layer = self.layer_of(op) if op.name == "linear" or op.name in NORMS else None
            if layer is not None:
                fed = self._fed.get(op.index, frozenset())
                self._facts.feeds.setdefault(layer, set()).add(fed)

    # ------------------------------------------------------------ reading the graph

    def layer_of(self, op: Op) -> str | None:
        """Module whose weight a linear or norm call read; None if it is shared or no parameter."""
        position = {"linear": 1, "layer_norm": 2, "rms_norm": 2}[op.name]
        weight = op.kwargs.get("weight", op.args[position] if len(op.args) > position else None)
        if not isinstance(weight, Ref):
            return None
        name = self._recording.values[weight.value].parameter
        return None if name is None else self._layers.get(name)

    def root_value(self, value: int) -> int:
        """Go back through operations that leave every row (token) as it is."""
        while (op := self._recording.producer(value)) is not None and self._same_rows(op, value):
            value = op.inputs[0]
        return value

    def _same_rows(self, op: Op, out: int) -> bool:
        if (
            op.name not in _SAME_ROWS
            or data_input(self._recording, op) != op.inputs[0]
            or len(op.outputs) != 1
        ):
            return False
        before, after = (self._recording.values[v].shape for v in (op.inputs[0], out))
        return before.numel() == after.numel() and before[-1:] == after[-1:]

    def _final_readers(self, value: int) -> list[Op]:
        """Calls that read a value or a reshaped view of it."""
        found: list[Op] = []
        for op in self._recording.readers(value):
            if len(op.outputs) == 1 and self._same_rows(op, op.outputs[0]):
                found += self._final_readers(op.outputs[0])
                if self._recording.values[op.outputs[0]].returned:
                    found.append(op)
            else:
                found.append(op)
        return found

    def _note_foreign_readers(self) -> None:
        for op in self._recording.ops:
            for number in op.inputs:
                name = self._recording.values[number].parameter
                layer = None if name is None else self._layers.get(name)
                if layer is not None and not self._own_call(op, layer):
                    self._facts.foreign.add(layer)

    def _own_call(self, op: Op, layer: str) -> bool:
        """Whether ``op`` is what the module itself does with its parameters."""
        if op.name != "linear" and op.name not in NORMS:
            return False
        inside = op.inside == layer or layer not in self._candidates
        return inside and self.layer_of(op) == layer

    # ------------------------------------------------------------ what makes a group's input

    def _source(self, value: int, group: frozenset[str]) -> Source:
        blocked = self._other_reader(value, group)
        if blocked:
            return Source("other", why=f"the tensor is also read by {blocked}")
        op = self._recording.producer(value)
        if op is None:
            return Source("other", why="the tensor comes from outside the model")
        if op.name in NORMS:
            layer = self.layer_of(op)
            if layer is None:
                return Source("other", why=f"{op.name} has no weight of its own to fold into")
            self._fed[op.index] = group
            return Source("norm", layer)
        return self._linear_source(value, group)

    def _other_reader(self, value: int, group: frozenset[str]) -> str | None:
        if self._recording.aliased_writes:
            return "an in-place operation on a view"
        if self._recording.values[value].returned:
            return "the caller: the model returns it"
        for op in self._final_readers(value):
            if op.name == "linear":
                layer = self.layer_of(op)
                if layer in group and op.inside == layer:
                    continue
                return f"{layer}, which is kept in float" if layer else "a linear operation"
            return f"{op.name}{f' in {op.inside}' if op.inside else ''}"
        return None

    def _linear_source(self, value: int, group: frozenset[str]) -> Source:
        steps: list[Step] = []
        while True:
            op = self._recording.producer(value)
            if op is None:
                return Source("other", why="the tensor comes from outside the model")
            if op.name == "linear":
                break
            before = data_input(self._recording, op)
            if before is None:
                return Source(
                    "other", why=f"{op.name} makes it, which does not commute with scaling"
                )
            readers = self._recording.values[before].readers
            if len(readers) != 1 or self._recording.values[before].returned:
                return Source("other", why=f"the input of {op.name} before it has another reader")
            steps.insert(0, Step(op, before, value))
            value = before
        layer = self.layer_of(op)
        if layer is None:
            return Source("other", why="a linear operation without a module of its own makes it")
        if not steps:
            rows: tuple[int, ...] | None = tuple(range(self._recording.values[value].shape[-1]))
        else:
            rows = rows_of_channels(self._recording, steps, self._recording.values[value].shape[-1])
        if rows is None:
            return Source("other", why=f"channels are mixed between {layer} and the tensor")
        self._fed[op.index] = group
        return Source("linear", layer, rows)
