"""What a pass is, what it reports, and the few questions that passes ask of an FX node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from ..capability import Capability


@dataclass(frozen=True)
class Entry:
    """One rewrite or refusal.

    Attributes:
        rule: name of the pass.
        site: module path, or the node's name outside any module.
        action: ``fused``, ``checked``, ``int8``, ``kept`` or ``refused``.
        detail: what the result is, or why nothing was done.
    """

    rule: str
    site: str
    action: str
    detail: str


@dataclass
class PassLog:
    """Collects the entries of one graph."""

    entries: list[Entry] = field(default_factory=list)

    def add(self, rule: str, node: fx.Node, action: str, detail: str) -> None:
        """Append an entry about ``node``'s site."""
        self.add_at(rule, site_of(node), action, detail)

    def add_at(self, rule: str, site: str, action: str, detail: str) -> None:
        """Append an entry about a site."""
        self.entries.append(Entry(rule, site, action, detail))


class Refused(Exception):
    """Why one rewrite is not made; a pass catches it and tells its log."""


class Pass(Protocol):
    """One family of rewrites. Instances are stateless.

    ``optional`` passes can be switched off by name (``options={"disable": (...)}``).
    """

    name: str
    optional: bool

    def run(self, graph: fx.Graph, capability: Capability, log: PassLog) -> None:
        """Rewrite ``graph`` in place; tell ``log`` of every rewrite and refusal."""
        ...


def site_of(node: fx.Node) -> str:
    """Path of the innermost module that the node was traced in, as ``named_modules`` spells it."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return str(node.name)
    path = str(next(reversed(stack.values()))[0])
    return module_path(path) or str(node.name)


def module_path(source: str) -> str:
    """Turn Dynamo's spelling of a module, ``L['self'].layer[0].query``, into ``layer.0.query``."""
    head, _, rest = source.partition("]")
    if not head.startswith(("L[", "G[")):
        rest = "." + source
    out = rest.replace("._modules['", ".").replace("['", ".").replace("']", "")
    return out.replace("[", ".").replace("]", "").lstrip(".")


def is_call(node: Any, *targets: Callable[..., Any]) -> bool:
    """True for a ``call_function`` node of one of ``targets``."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def value(node: fx.Node) -> torch.Tensor:
    """The node's fake tensor: its shape (perhaps symbolic), dtype and device."""
    fake: torch.Tensor = node.meta["val"]
    return fake


def same_shape(a: fx.Node, b: fx.Node) -> bool:
    """True if both shapes are equal for all values of their symbols, as far as can be proved."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    left, right = value(a).shape, value(b).shape
    return len(left) == len(right) and all(
        statically_known_true(x == y) for x, y in zip(left, right, strict=True)
    )


def argument(node: fx.Node, name: str) -> Any:
    """Value of the argument called ``name``, given by position, by keyword or by default."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, arg in enumerate(node.target._schema.arguments):
        if arg.name == name:
            if name in node.kwargs:
                return node.kwargs[name]
            if position < len(node.args):
                return node.args[position]
            # A schema spells a default dtype as its number; ours is float32.
            return torch.float32 if name == "out_dtype" else arg.default_value
    raise KeyError(name)


def replace_with(graph: fx.Graph, old: fx.Node, call: fx.Node, **changes: Any) -> fx.Node:
    """Put a call of ``call``'s operator, with some arguments changed, in the place of ``old``.

    The new node keeps ``old``'s value description and ``call``'s place in the module tree.
    """
    assert isinstance(call.target, torch._ops.OpOverload)
    names = [arg.name for arg in call.target._schema.arguments]
    arguments = {name: argument(call, name) for name in names} | changes
    with graph.inserting_before(old):
        new = graph.call_function(call.target, tuple(arguments[name] for name in names))
    new.meta = {**old.meta, "nn_module_stack": call.meta.get("nn_module_stack", {})}
    old.replace_all_uses_with(new)
    graph.erase_node(old)
    return new
