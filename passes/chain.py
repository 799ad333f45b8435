"""What the recognizers of foreign quantization chains share: reading nodes, and adding new ones."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from .. import ops as _ops  # noqa: F401 - defines the operators
from .. import packing as _packing  # noqa: F401 - defines packed_of
from ..ops import MAX_K, ZERO_POINT_S8
from .base import is_call, value

aten = torch.ops.aten
QLINEAR = torch.ops.qinductor.qlinear.default
QUANTIZE = torch.ops.qinductor.quantize.default
PER_TOKEN = torch.ops.qinductor.quantize_per_token.default
PACKED_OF = torch.ops.qinductor.packed_of.default
CONVERT = torch.ops.prims.convert_element_type.default
VIEWS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
HALF_DTYPES = (torch.bfloat16, torch.float16)
FLOAT_DTYPES = (torch.float32, *HALF_DTYPES)

PACKED_NOTE = "weight packed once per process, kept beside the model's own copy"
"""In the report line of every rewritten linear; :mod:`qinductor.packing` says what it costs."""


# ---------------------------------------------------------------- reading


def true(condition: Any) -> bool:
    """True only if ``condition``, perhaps symbolic, holds for all values of its symbols."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def unview(node: Any) -> Any:
    """The node that ``node`` is a reshaped view of."""
    while is_call(node, *VIEWS):
        node = node.args[0]
    return node


def unview_rows(node: Any, k: Any) -> Any:
    """The node that ``node`` is a view of, as far as the view keeps the last dimension of K."""
    while is_call(node, *VIEWS) and true(value(node.args[0]).shape[-1] == k):
        node = node.args[0]
    return node


def unconvert(node: Any) -> Any:
    """The node that ``node`` is a view or another dtype of."""
    while is_call(node, CONVERT, *VIEWS):
        node = node.args[0]
    return node


def operands(node: Any, target: Any) -> tuple[Any, Any] | None:
    """Both operands of a binary ``aten.<op>.Tensor`` without ``alpha``; None for another node."""
    if not is_call(node, target) or len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    return node.args[0], node.args[1]


def other_operand(node: Any, target: Any, known: fx.Node) -> fx.Node | None:
    """The tensor that a commutative ``node`` combines ``known`` with."""
    pair = operands(node, target)
    if pair is None or known not in pair:
        return None
    other = pair[1] if pair[0] is known else pair[0]
    return other if is_tensor(other) and other is not known else None


def is_tensor(node: Any) -> bool:
    """True for a node whose value is one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def only_reader(node: fx.Node) -> fx.Node | None:
    """The node that alone reads ``node``; None where several do, or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def has_one_element(node: fx.Node) -> bool:
    """True if the tensor has one element, whatever its symbols are."""
    return true(value(node).numel() == 1)


def is_vector(node: Any, length: Any) -> bool:
    """True for a float tensor of shape (length,)."""
    return (
        is_tensor(node)
        and value(node).dtype in FLOAT_DTYPES
        and value(node).dim() == 1
        and true(value(node).shape[0] == length)
    )


def untransposed(node: Any) -> Any:
    """The (N, K) node of which ``node`` is the (K, N) transpose; None for another node."""
    if is_call(node, aten.permute.default) and list(node.args[1]) == [1, 0]:
        return node.args[0]
    return node.args[0] if is_call(node, aten.t.default) else None


def stored_weight(node: Any) -> fx.Node | None:
    """The graph input (or attribute) that a weight is; None for one that is computed."""
    while is_call(node, aten.clone.default):
        node = node.args[0]
    if not is_tensor(node) or node.op not in ("placeholder", "get_attr"):
        return None
    found: fx.Node = node
    return found


def reason_against_weight(weight: fx.Node | None) -> str | None:
    """Why an int8 linear cannot be made of ``weight``; None if it can."""
    if weight is None:
        return "the weight is computed in the graph: it would be packed in every call"
    fake = value(weight)
    if fake.device.type != "cpu":
        return f"device {fake.device}: there is a template for cpu only"
    if fake.dtype is not torch.int8 or fake.dim() != 2:
        return f"the weight is {fake.dtype} of {fake.dim()} dimensions, not int8 (N, K)"
    if any(isinstance(size, torch.SymInt) for size in fake.shape):
        return f"the weight has the symbolic shape {tuple(fake.shape)}"
    k = fake.shape[1]
    return f"K={k} can overflow the int32 sum; at most {MAX_K} is exact" if k > MAX_K else None


# ---------------------------------------------------------------- adding


class Builder:
    """Adds nodes that carry a value description, and shares constants and packed weights."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._fake_mode = torch._guards.detect_fake_mode([n.meta.get("val") for n in graph.nodes])
        self._constants: dict[tuple[object, ...], fx.Node] = {}
        self._zero_points: dict[fx.Node, fx.Node] = {}

    def call(
        self, before: fx.Node, like: fx.Node, target: Any, *args: Any, **kwargs: Any
    ) -> fx.Node:
        """Add a call in front of ``before``. It belongs to the module that ``like`` belongs to."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        if stack := like.meta.get("nn_module_stack"):
            node.meta["nn_module_stack"] = stack
        self._describe(node)
        return node

    def constant(self, number: float, dtype: torch.dtype, size: tuple[int, ...] = ()) -> fx.Node:
        """A tensor filled with ``number``; one node for all its readers."""
        key = (number, dtype, size)
        if key not in self._constants:
            head = self._head()
            self._constants[key] = self.call(
                head, head, aten.full.default, list(size), number,
                dtype=dtype, device=torch.device("cpu"), pin_memory=False,
            )  # fmt: skip
        return self._constants[key]

    def packed(self, weight: fx.Node, zero_point: fx.Node | None = None) -> tuple[fx.Node, fx.Node]:
        """Packed form and sums of a weight, out of the graph's one call of ``packed_of``."""
        node = next((n for n in self.graph.nodes if is_call(n, PACKED_OF)), None)
        if node is None:
            head = self._head()
            with self.graph.inserting_before(head):
                node = self.graph.call_function(PACKED_OF, ([], []))
        weights, zero_points = (list(a) for a in node.args)
        for given, known in ((weight, weights), (zero_point, zero_points)):
            if given is not None and given not in known:
                known.append(given)
                if given.op == "get_attr":
                    node.prepend(given)
        node.args = (weights, zero_points)
        self._describe(node)
        first = 2 * weights.index(weight)
        packed, w_sum = (self.item(node, i) for i in (first, first + 1))
        return packed, w_sum

    def zero_point_plus_128(self, zero_point: fx.Node) -> fx.Node:
        """A one-element zero point of signed codes as that of the same codes carried as uint8."""
        if zero_point not in self._zero_points:
            before = self.after(zero_point)
            flat = self.call(before, before, aten.reshape.default, zero_point, [1])
            wide = self.call(before, before, CONVERT, flat, torch.int32)
            self._zero_points[zero_point] = self.call(
                before, before, aten.add.Tensor, wide, ZERO_POINT_S8
            )
        return self._zero_points[zero_point]

    def as_uint8(self, before: fx.Node, codes: fx.Node) -> fx.Node:
        """Signed codes, shifted by 128 into uint8."""
        wide = self.call(before, codes, CONVERT, codes, torch.int32)
        shifted = self.call(before, codes, aten.add.Tensor, wide, ZERO_POINT_S8)
        return self.call(before, codes, CONVERT, shifted, torch.uint8)

    def weight_scale(self, before: fx.Node, scale: fx.Node, n: int) -> fx.Node:
        """A weight's scale, (N,), (N, 1) or of one element, as float32 (N,)."""
        if value(scale).dtype is not torch.float32:
            scale = self.call(before, before, CONVERT, scale, torch.float32)
        if has_one_element(scale) and n != 1:
            flat = self.call(before, before, aten.reshape.default, scale, [1])
            return self.call(before, before, aten.expand.default, flat, [n])
        if value(scale).dim() != 1:
            return self.call(before, before, aten.reshape.default, scale, [n])
        return scale

    def replace(self, old: fx.Node, new: fx.Node, sizes: Any = None) -> None:
        """Give ``new`` to all readers of ``old``, in ``old``'s shape.

        ``sizes`` are the arguments of the view that ``old``'s shape came from; a matrix needs none.
        """
        if not equal_shapes(new, old):
            n = value(new).shape[-1]
            new = self.call(old, new, aten.reshape.default, new, sizes or [-1, n])
        old.replace_all_uses_with(new)

    def item(self, node: fx.Node, index: int) -> fx.Node:
        """One result of a node that has several."""
        found = next((u for u in node.users if u.args[1] == index), None)
        return found or self.call(node.next, node, operator.getitem, node, index)

    def _describe(self, node: fx.Node) -> None:
        """Compute the value description of a node from those of its arguments."""
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        assert callable(node.target)
        with self._fake_mode or contextlib.nullcontext():
            node.meta["val"] = node.target(*args, **kwargs)

    def after(self, node: fx.Node) -> fx.Node:
        """Where to insert what reads ``node`` and is to be known to all that comes after it."""
        return self._head() if node.op == "placeholder" else node.next

    def _head(self) -> fx.Node:
        """The first node that is not an input: what stands before it is known to all nodes."""
        head: fx.Node = next(n for n in self.graph.nodes if n.op != "placeholder")
        return head


def equal_shapes(a: fx.Node, b: fx.Node) -> bool:
    """True if both shapes are equal for all values of their symbols, as far as can be proved."""
    left, right = value(a).shape, value(b).shape
    return len(left) == len(right) and all(true(x == y) for x, y in zip(left, right, strict=True))
