"""The spec written into Dynamo's graph, before AOTAutograd: forward and backward follow from it.

The graph is copied, call by call, through the code that eager simulation runs; seed and step are
two more inputs. Dynamo's own graph stays as it is.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._ops import HigherOrderOperator

from qinductor.errors import ConfigError
from qinductor.passes.base import Entry, module_path

from .applying import Pass, perform
from .composite import perform_composite, touches
from .eager import data_parallel_rank
from .handle import Place, Simulation, place_of
from .operations import OPERATIONS, Form, form_of
from .spec import SimulationSpec

RULE = "simulate"


@dataclass
class SimulatedGraph:
    """A rewritten graph.

    Attributes:
        module: it, with seed and step as two more inputs.
        entries: what is simulated, for the report.
        simulation: whose seed and step it runs with.
        part: which part of the forward pass it is.
    """

    module: fx.GraphModule
    entries: list[Entry]
    simulation: Simulation
    part: Any

    def example_inputs(self) -> tuple[Tensor, Tensor]:
        """What to compile with."""
        return self.simulation.seed, self.simulation.step.clone()

    def more_inputs(self) -> tuple[Tensor, Tensor]:
        """Seed and step of one call, 0-d int64."""
        return self.simulation.seed, self.simulation.begin(self.part)


def simulate_graph(
    gm: fx.GraphModule, chosen: SimulationSpec | Simulation, *, complete: bool
) -> SimulatedGraph:
    """Rewrite one Dynamo graph.

    Args:
        gm: the graph; it is not changed.
        chosen: a spec, or the simulation to share seed, step and sites with.
        complete: the graph is all of a forward pass, so that a rule that matches nothing in it
            matches nothing.

    Raises:
        ConfigError: a rule matches nothing; an operand is no floating-point tensor.
    """
    simulation = chosen if isinstance(chosen, Simulation) else simulation_of_spec(chosen)
    part, start = simulation.open_part(_compilation())
    run = Pass(simulation, None, None, data_parallel_rank(), Counter(start))
    writer = _Writer(gm, run)
    module = writer.write()
    simulation.close_part(part, run.calls - start)
    if complete and not start and not torch.distributed.is_initialized():
        simulation.check_matched(writer.places, run.calls)
    return SimulatedGraph(module, writer.entries, simulation, part)


def _compilation() -> tuple[Any, Any] | None:
    """(frame, trace) of what Dynamo compiles: a frame keeps its number when it is recompiled."""
    context = torch._guards.CompileContext.try_get()
    if context is None or context.compile_id is None:
        return None
    return context.compile_id.frame_id, (str(context.compile_id), context.attempt)


_OF_SPEC: dict[int, tuple[weakref.ref[SimulationSpec], Simulation]] = {}


def simulation_of_spec(spec: SimulationSpec) -> Simulation:
    """The one simulation of a spec object that was given as an option."""
    known = _OF_SPEC.get(id(spec))
    if known is None or known[0]() is not spec:
        _OF_SPEC[id(spec)] = known = (weakref.ref(spec), Simulation(spec))
        weakref.finalize(spec, _OF_SPEC.pop, id(spec), None)
    return known[1]


def simulation_of(compiled: Any) -> Simulation:
    """The simulation that a compiled model runs with: seed, step, sites, state_dict().

    Args:
        compiled: what ``torch.compile(..., options={"simulate": ...})`` returned, after a call.

    Raises:
        ConfigError: nothing of it was compiled with a simulation.
    """
    from qinductor.report import records_of

    for record in records_of(compiled):
        if record.simulation is not None:
            return record.simulation
    raise ConfigError(
        "simulation_of() found no simulation: call the compiled model once, and compile it with "
        "options={'simulate': spec}."
    )


@dataclass
class _Writer:
    """Copies a graph and puts the spec around its operations."""

    gm: fx.GraphModule
    run: Pass
    entries: list[Entry] = field(default_factory=list)
    places: dict[Place, None] = field(default_factory=dict)
    graph: fx.Graph = field(default_factory=fx.Graph)
    attributes: dict[str, Any] = field(default_factory=dict)

    def write(self) -> fx.GraphModule:
        """The copy, with placeholders for seed and step after its own."""
        self.tracer = fx.proxy.GraphAppendingTracer(self.graph)
        self.copies: dict[fx.Node, fx.Node] = {}
        nodes = list(self.gm.graph.nodes)
        first = next(n for n in nodes if n.op != "placeholder")
        for node in nodes:
            if node is first:
                self.run.seed, self.run.step = (
                    self._proxy(self.graph.placeholder(f"qinductor_{n}")) for n in ("seed", "step")
                )
            if node.op in ("get_attr", "call_module"):
                self.attributes[node.target] = _attribute(self.gm, node.target)
            if node.target is tag_activation_checkpoint:
                self.copies[node] = self._checkpoint(node)
                continue
            form = form_of(node.target) if node.op in ("call_function", "call_method") else None
            if form is None:
                self._look_inside(node)
                self.copies[node] = self._copy(node)
            else:
                self.copies[node] = self._operation(node, form)
        return fx.GraphModule(self.attributes, self.graph, class_name=type(self.gm).__name__)

    def _proxy(self, node: fx.Node) -> fx.Proxy:
        return fx.Proxy(node, self.tracer)

    def _copy(self, node: fx.Node) -> fx.Node:
        return self.graph.node_copy(node, self.copies.__getitem__)

    def _operation(self, node: fx.Node, form: Form) -> fx.Node:
        """An operation with its roundings."""
        place = self._place(node)
        args, kwargs = fx.map_arg(
            (node.args, dict(node.kwargs)), lambda n: self._proxy(self.copies[n])
        )
        before = len(self.graph.nodes)
        if form.operands:
            out = perform(self.run, place, form, node.target, args, kwargs)
        else:
            call = self.run.next_call(place, form.operation)
            if not touches(self.run, place, form.operation):
                return self._copy(node)
            composite = Composite(self.run, place, form, node.target, call)
            everything = (self.run.seed, self.run.step, *args)
            out = self.tracer.create_proxy("call_function", composite, everything, kwargs)
        for new in list(self.graph.nodes)[before:]:
            new.meta = {**node.meta, **new.meta}
        self._report(place, form)
        made: fx.Node = out.node
        return made

    def _report(self, place: Place, form: Form) -> None:
        if form.operands:
            found = {form.operation: self.run.simulation.settings(place, form.operation)}
        else:
            found = {op: self.run.simulation.settings(place, op) for op in OPERATIONS}
        for op, settings in found.items():
            if settings:
                detail = f"{op}: {settings}"
                entry = Entry(RULE, place.path or "(model)", "simulated", detail)
                if entry not in self.entries:
                    self.entries.append(entry)

    def _checkpoint(self, node: fx.Node) -> fx.Node:
        """A checkpoint's body is simulated too; what is recomputed draws the same bits."""
        body = node.args[0]
        writer = _Writer(self.attributes[body.target], self.run, self.entries, self.places)
        outer = self.run.seed, self.run.step
        module = writer.write()
        self.run.seed, self.run.step = outer
        name = f"{body.target}_simulated"
        self.attributes[name] = module
        rest, kwargs = fx.map_arg((node.args[1:], dict(node.kwargs)), self.copies.__getitem__)
        arguments = (self.graph.get_attr(name), *rest, *(p.node for p in outer))
        new = self.graph.call_function(tag_activation_checkpoint, arguments, kwargs)
        new.meta = dict(node.meta)
        return new

    def _look_inside(self, node: fx.Node) -> None:
        """Refuse, visibly, what a spec cannot reach: operations in other control flow."""
        for argument in node.args if isinstance(node.target, HigherOrderOperator) else ():
            inner = getattr(argument, "op", None) == "get_attr" and self.attributes.get(
                argument.target
            )
            if isinstance(inner, fx.GraphModule):
                held = {f.operation for n in inner.graph.nodes if (f := form_of(n.target))}
                if held:
                    detail = f"{', '.join(sorted(held))} inside {node.target}: not simulated"
                    place = self._place(node).path or str(node.name)
                    self.entries.append(Entry(RULE, place, "refused", detail))

    def _place(self, node: fx.Node) -> Place:
        """The innermost module that the node was traced in; the model where there is none."""
        stack = node.meta.get("nn_module_stack") or {}
        places = [place_of(module_path(str(path)), kind) for path, kind in stack.values()]
        self.places.update(dict.fromkeys(places))
        return places[-1] if places else self.run.simulation.root


class Composite:
    """What stands in a graph for attention: run, it calls the parts with their roundings."""

    __module__ = __name__

    def __init__(self, run: Pass, place: Place, form: Form, callee: Any, call: int) -> None:
        self.__name__ = self.__qualname__ = f"simulated_{form.operation}_{place.path}_{call}"
        self.run, self.place, self.form, self.callee = run, place, form, callee
        self.call = call

    def __call__(self, seed: Tensor, step: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The operation's result. AOTAutograd traces this, perhaps more than once."""
        run = Pass(self.run.simulation, seed, step, self.run.rank)
        run.calls[self.place.path, self.form.operation] = self.call
        return perform_composite(run, self.place, self.form, self.callee, args, kwargs)


def _attribute(owner: Any, target: str) -> Any:
    for name in target.split("."):
        owner = getattr(owner, name)
    return owner
