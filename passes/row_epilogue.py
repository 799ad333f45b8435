"""Epilogues over whole rows: layer normalization and the next layer's quantizer."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import fused_ops as _fused_ops  # noqa: F401 - defines the operators
from ..capability import Capability
from .base import PassLog, Refused, argument, is_call, value

QLINEAR = torch.ops.qinductor.qlinear.default
ROWS = torch.ops.qinductor.qlinear_rows.default
QUANTIZE = torch.ops.qinductor.quantize.default
PER_TOKEN = torch.ops.qinductor.quantize_per_token.default
VAR_MEAN = torch.ops.aten.var_mean.correction
ADD = torch.ops.aten.add.Tensor
SUB = torch.ops.aten.sub.Tensor
MUL = torch.ops.aten.mul.Tensor
RSQRT = torch.ops.aten.rsqrt.default


@dataclass(frozen=True)
class _Norm:
    """A layer normalization in the graph: its result and its arguments."""

    output: fx.Node
    weight: fx.Node
    bias: fx.Node
    eps: float


class FuseRows:
    """quantizer(layer_norm(qlinear(x))) → qlinear_rows(x), with either of the two alone as well.

    A quantizer with a fixed scale and no normalization needs no rows: that is ``fuse_requantize``.
    """

    name = "fuse_rows"
    optional = True

    def run(self, graph: fx.Graph, capability: Capability, log: PassLog) -> None:
        """See the class."""
        for node in list(graph.nodes):
            if not is_call(node, QLINEAR):
                continue
            normalized = any(is_call(user, VAR_MEAN) for user in node.users)
            if not normalized and not any(is_call(user, PER_TOKEN) for user in node.users):
                continue
            try:
                if argument(node, "out_dtype") is not torch.float32:
                    raise Refused(
                        f"output is {argument(node, 'out_dtype')}, whose rounding is part of the "
                        "result"
                    )
                if value(node).device.type != "cpu":
                    raise Refused(f"no kernel by rows for device {value(node).device.type}")
                norm = _layer_norm(node) if normalized else None
                detail = _fuse(graph, node, norm)
            except Refused as why:
                log.add(self.name, node, "refused", str(why))
            else:
                log.add(self.name, node, "fused", detail)


def _layer_norm(y: fx.Node) -> _Norm:
    """The layer normalization, decomposed, that is all that reads ``y``."""
    if value(y).dim() < 2:
        raise Refused("the linear's output has no rows")
    if len(y.users) != 2:
        raise Refused("the input of the normalization has other readers as well")
    statistics = next(user for user in y.users if is_call(user, VAR_MEAN))
    if list(statistics.args[1]) not in ([value(y).dim() - 1], [-1]) or dict(statistics.kwargs) != {
        "correction": 0,
        "keepdim": True,
    }:
        raise Refused("the normalization is not over the last dimension")
    by_index = {user.args[1]: user for user in statistics.users if is_call(user, operator.getitem)}
    if set(by_index) != {0, 1} or len(statistics.users) != 2:
        raise Refused("mean and variance are not read once each")
    shifted = _only_user(by_index[0], ADD)
    eps = shifted.args[1]
    if not isinstance(eps, float):
        raise Refused("eps is not a constant")
    centred = _only_user(by_index[1], SUB)
    scaled = _only_user(_only_user(shifted, RSQRT), MUL)
    if centred.args != (y, by_index[1]) or scaled is not _only_user(centred, MUL):
        raise Refused("mean and variance are used for something else")
    weighted = _only_user(scaled, MUL)
    output = _only_user(weighted, ADD)
    weight, bias = _parameter(weighted, scaled), _parameter(output, weighted)
    if value(weight).dtype != value(bias).dtype:
        raise Refused(f"its weight is {value(weight).dtype} and its bias {value(bias).dtype}")
    return _Norm(output, weight, bias, eps)


def _only_user(node: fx.Node, target: Any) -> fx.Node:
    users = list(node.users)
    if len(users) != 1 or not is_call(users[0], target) or users[0].kwargs:
        raise Refused("it is no layer normalization with weight and bias")
    return users[0]


def _parameter(call: fx.Node, other: fx.Node) -> fx.Node:
    """The argument of ``call`` that is not ``other``: a float vector of the last dimension."""
    left, right = call.args
    found = right if left is other else left
    if (
        not isinstance(found, fx.Node)
        or value(found).dim() != 1
        or value(found).shape[0] != value(call).shape[-1]
        or value(found).dtype not in (torch.float32, torch.bfloat16, torch.float16)
        or value(call).dtype is not torch.float32
    ):
        raise Refused("the normalization has no weight or bias of one element a column")
    return found


def _fuse(graph: fx.Graph, linear: fx.Node, norm: _Norm | None) -> str:
    """Replace ``linear`` and what follows it; return what the report says."""
    result = linear if norm is None else norm.output
    quantizer = next((user for user in result.users if _can_follow(user, result)), None)
    keeps = len(result.users) > (0 if quantizer is None else 1)
    if norm is None and (quantizer is None or keeps):
        raise Refused("the float output has other readers as well")
    names = ("x", "x_scale", "x_zero_point", "packed", "w_scale", "w_sum", "bias", "residual")
    kind = "none"
    fixed: tuple[Any, Any] = (None, None)
    per_token: tuple[Any, float, float] = (None, 1.0, 0.0)
    if quantizer is not None and quantizer.target is QUANTIZE:
        kind = "fixed"
        fixed = (argument(quantizer, "inverse_scale"), argument(quantizer, "zero_point"))
    elif quantizer is not None:
        kind = "per_token"
        names_of_it = ("multiplier", "divisor", "min_scale")
        per_token = tuple(argument(quantizer, name) for name in names_of_it)
    affine = (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
    with graph.inserting_after(result):
        rows = graph.call_function(
            ROWS,
            (
                *(argument(linear, name) for name in names),
                argument(linear, "activation"),
                *affine,
                keeps,
                kind,
                *fixed,
                *per_token,
            ),
        )
    outputs = [(result, value(result))] if keeps else []
    if quantizer is not None and kind == "fixed":
        outputs.append((quantizer, value(quantizer)))
    elif quantizer is not None:
        outputs.extend((quantizer, v) for v in quantizer.meta["val"])
    rows.meta = {**result.meta, "val": [v for _, v in outputs]}
    rows.meta["nn_module_stack"] = linear.meta.get("nn_module_stack", {})
    after = rows
    for index, (old, fake) in enumerate(outputs):
        with graph.inserting_after(after):
            item = after = graph.call_function(operator.getitem, (rows, index))
        item.meta = {**old.meta, "val": fake}
        if kind == "per_token" and old is not result:
            for user in list(old.users):
                if user.args[1] == index - keeps:
                    user.replace_all_uses_with(item)
        else:
            old.replace_all_uses_with(item, delete_user_cb=lambda user: user is not quantizer)
    graph.eliminate_dead_code()
    parts = ["layer normalization"] if norm is not None else []
    if kind != "none":
        parts.append("quantizer" if kind == "fixed" else "quantizer per token")
    return f"{' and '.join(parts)} in the epilogue, while a row is in the cache"


def _can_follow(user: fx.Node, result: fx.Node) -> bool:
    """True for a quantizer whose scales exist where ``result`` does."""
    return is_call(user, QUANTIZE, PER_TOKEN) and all(
        node < result for node in user.all_input_nodes if node is not result
    )
