"""Recognize an activation in a graph whose activations have been decomposed.

The pattern of an activation is the activation itself, traced through Inductor's decompositions, so
it follows them from one torch version to the next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

# Functions of one argument, which is what the tracer takes.
_SOURCES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": lambda x: F.silu(x),
    "relu": lambda x: F.relu(x),
    "tanh": lambda x: torch.tanh(x),
}


@dataclass(frozen=True)
class Found:
    """An activation in a graph.

    Attributes:
        name: which one.
        output: the node of its result.
        read_elsewhere: its input, or a step of its computation, has a reader outside of it.
    """

    name: str
    output: fx.Node
    read_elsewhere: bool


@functools.cache
def _patterns() -> dict[str, tuple[fx.Graph, ...]]:
    """Name → graphs of one placeholder and one output: the plain call and its decomposition."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    example = torch.zeros(2, 2)
    return {
        name: (
            make_fx(function)(example).graph,
            make_fx(function, decomposition_table=select_decomp_table())(example).graph,
        )
        for name, function in _SOURCES.items()
    }


def match_activation(source: fx.Node) -> Found | None:
    """Find the activation of ``source``, best one that is all that reads it; None without one."""
    found = [
        Found(name, *bound)
        for name, graphs in _patterns().items()
        for graph in graphs
        if (bound := _bind(graph, source)) is not None
    ]
    return min(found, key=lambda f: f.read_elsewhere, default=None)


def _bind(pattern: fx.Graph, source: fx.Node) -> tuple[fx.Node, bool] | None:
    """Walk ``pattern`` forwards from ``source``, one counterpart a node.

    Returns:
        The node bound to the pattern's result, and whether a counterpart before it is read from
        outside and so could not be removed. None where the pattern is not there.
    """
    placeholder, *body, output = pattern.nodes
    bound: dict[Any, Any] = {placeholder: source}
    for node in body:
        args = tuple(bound[a] if isinstance(a, fx.Node) else a for a in node.args)
        reader = next((a for a in args if isinstance(a, fx.Node)), None)
        if reader is None:
            return None
        match = next(
            (
                user
                for user in reader.users
                if user.op == "call_function"
                and user.target is node.target
                and _equal(user.args, args)
                and dict(user.kwargs) == dict(node.kwargs)
                and user not in bound.values()
            ),
            None,
        )
        if match is None:
            return None
        bound[node] = match
    (result,) = output.args
    inner = {real for real in bound.values() if real is not bound[result]}
    known = set(bound.values())
    return bound[result], any(user not in known for real in inner for user in real.users)


def _equal(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    """Equal arguments; 1 and 1.0 are the same number."""
    return len(left) == len(right) and all(
        a is b if isinstance(a, fx.Node) or isinstance(b, fx.Node) else a == b
        for a, b in zip(left, right, strict=True)
    )
