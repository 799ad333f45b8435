"""Models that torchao and PT2E quantized, and the graphs that Inductor makes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

from qinductor.capability import Capability
from qinductor.passes.base import Entry, Pass, PassLog

HIDDEN = 64


def mlp(*, bias: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Two Linears and a ReLU, which is exact: two compilers' outputs can be equal."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Linear(HIDDEN, 96, bias=bias), nn.ReLU(), nn.Linear(96, HIDDEN, bias=bias)
        )
    return net.to(dtype).eval()


def inputs(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    """Normal values with one large column, so that a row's extremes are not symmetric."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x[..., 3] += 4.0
    return x.to(dtype)


def torchao_model(
    model: nn.Module,
    x: Tensor,
    *,
    static: bool,
    smooth: bool = True,
    asymmetric: bool = False,
    per_tensor_weight: bool = False,
    per_row_static: bool = False,
    reduce_range: bool = False,
) -> nn.Module:
    """Convert with torchao: with its SmoothQuant prototype unless dynamic and not ``smooth``.

    A static scale comes from that prototype in any case; without ``smooth`` its factors are 1.
    """
    from torchao.prototype.smoothquant import SmoothQuantConfig
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8StaticActivationInt8WeightConfig,
        MappingType,
        PerRow,
        PerTensor,
        quantize_,
    )

    activation = PerTensor() if static and not per_row_static else PerRow()
    # set_inductor_config would change torch._inductor.config for the whole process.
    base: Any = (
        Int8StaticActivationInt8WeightConfig if static else Int8DynamicActivationInt8WeightConfig
    )(
        granularity=[activation, PerTensor() if per_tensor_weight else PerRow()],
        act_mapping_type=MappingType.ASYMMETRIC if asymmetric else MappingType.SYMMETRIC,
        reduce_range=reduce_range,
        set_inductor_config=False,
    )
    alpha = 0.5 if smooth else None
    model = copy.deepcopy(model)
    if not static and not smooth:
        quantize_(model, base)
        return model
    with torch.no_grad():
        quantize_(model, SmoothQuantConfig(base_config=base, step="prepare", alpha=alpha))
        model(x)
        quantize_(model, SmoothQuantConfig(base_config=base, step="convert", alpha=alpha))
    return model


def pt2e_model(
    model: nn.Module,
    x: Tensor,
    *,
    dynamic_activation: bool = False,
    reduce_range: bool = False,
    dynamic_shapes: Any = None,
) -> nn.Module:
    """Export and convert with torchao's PT2E and its X86 quantizer."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    exported = torch.export.export(model, (x,), dynamic_shapes=dynamic_shapes).module()
    quantizer = x86.X86InductorQuantizer().set_global(
        x86.get_default_x86_inductor_quantization_config(
            is_dynamic=dynamic_activation, reduce_range=reduce_range
        )
    )
    prepared = prepare_pt2e(exported, quantizer)
    prepared(x)
    converted: nn.Module = convert_pt2e(prepared)
    return converted


def one_linear(n: int = 32, *, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """One Linear inside a container: torchao cannot replace the root module."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(HIDDEN, n)).to(dtype).eval()


class _Captured(Exception):
    """Ends a compilation once its graph is taken."""


@dataclass(frozen=True)
class Capture:
    """A post-grad graph before and after a pass, with inputs to run both on."""

    before: fx.GraphModule
    after: fx.GraphModule
    arguments: list[Any]
    entries: list[Entry]

    def count(self, *targets: Any) -> int:
        """Calls of any of ``targets`` in the rewritten graph."""
        return sum(n.target in targets for n in self.after.graph.nodes)

    def details(self, action: str) -> list[str]:
        """What the pass said of its rewrites or refusals."""
        return [e.detail for e in self.entries if e.action == action]

    def outputs(self) -> tuple[Tensor, Tensor]:
        """First output of both graphs, each operator run eagerly."""
        with torch.no_grad():
            (old, *_), (new, *_) = (
                fx.Interpreter(gm).run(*self.arguments) for gm in (self.before, self.after)
            )
        return old, new


def capture(
    model: nn.Module,
    x: Tensor,
    rule: Pass,
    *,
    dynamic: bool | None = None,
    edit: Callable[[fx.Graph], None] | None = None,
) -> Capture:
    """Compile ``model`` up to Inductor's post-grad graph, ``edit`` it, and run ``rule`` over it."""
    from torch._inductor.compile_fx import compile_fx

    taken: list[Any] = []

    class Take(CustomGraphPass):  # type: ignore[misc]
        def __call__(self, graph: fx.Graph) -> None:
            if edit is not None:
                edit(graph)
                graph.lint()
            before = _copied(graph)
            log = PassLog()
            rule.run(graph, Capability.detect(), log)
            graph.lint()
            taken.extend((before, _copied(graph), log))
            raise _Captured

        def uuid(self) -> None:
            return None

    def backend(gm: fx.GraphModule, example: list[Any]) -> Any:
        # Dynamo may trace again, with other sizes known; the last attempt counts.
        taken[:] = [[leaf for e in example for leaf in _leaves(e)]]
        return compile_fx(gm, example, config_patches={"post_grad_custom_pre_pass": Take()})

    torch._dynamo.reset()
    try:
        with torch.no_grad():
            torch.compile(model, backend=backend, dynamic=dynamic)(x)
    except Exception:
        if len(taken) != 4:
            raise
    arguments, before, after, log = taken
    return Capture(before, after, arguments, log.entries)


def _copied(graph: fx.Graph) -> fx.GraphModule:
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return fx.GraphModule(graph.owning_module, copied)


def _leaves(tensor: Any) -> list[Any]:
    """Plain tensors of a wrapper subclass in the order in which they become graph inputs."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [leaf for name in names for leaf in _leaves(getattr(tensor, name))]
