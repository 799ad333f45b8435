"""What was fused, what runs as int8, what was left alone, and why.

The backend opens one :class:`GraphRecord` for every graph it compiles; :func:`explain` gathers
those of one compiled model into a :class:`Report`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CellType
from typing import TYPE_CHECKING, Any

import torch

from .passes.base import Entry

if TYPE_CHECKING:
    from .simulation import Simulation


@dataclass
class GraphRecord:
    """One compiled graph.

    Attributes:
        inputs: the tensors the graph was compiled and called with, weakly: how it is found by its
            model.
        isa: name of the instruction set that templates were capped to.
        graph_break: why Dynamo ended the graph here, or None.
        entries: what the passes did; empty until they ran or their entries were read back.
        from_cache: the graph came from Inductor's cache.
        counts_calls: the graph is called through the backend, which counts.
        simulated: what a simulation spec did to the graph, before the passes ran.
        simulation: the seed and step that it runs with, or None.
    """

    inputs: list[weakref.ref[torch.Tensor]]
    isa: str
    graph_break: str | None = None
    entries: list[Entry] = field(default_factory=list)
    passes_ran: bool = False
    from_cache: bool = False
    counts_calls: bool = True
    simulated: list[Entry] = field(default_factory=list)
    simulation: Simulation | None = None
    _calls: Iterator[int] = field(default_factory=itertools.count)
    _marker: int | None = None
    _marked: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)

    def count_call(self, args: Sequence[Any]) -> None:
        """Add one call. One step of an iterator, which is atomic between threads.

        Dynamo runs one graph for all modules of a class. The first weight tells which one it is;
        at a weight that was not seen before, the graph becomes that module's as well.
        """
        next(self._calls)
        if self._marker is None:
            return
        weight = args[self._marker]
        known = self._marked.get(id(weight))
        if known is None or known() is not weight:
            self.called_with(args)

    def called_with(self, args: Sequence[Any]) -> None:
        """Remember the tensors among ``args`` as inputs of this graph."""
        refs = {i: weakref.ref(t) for i, t in enumerate(args) if isinstance(t, torch.Tensor)}
        if self._marker is None:
            weights = (i for i in refs if _is_weight(args[i]))
            self._marker = next(weights, None)
        self.inputs = [ref for ref in self.inputs if ref() is not None] + list(refs.values())
        if self._marker is not None:
            self._marked[id(args[self._marker])] = refs[self._marker]

    @property
    def calls(self) -> int | None:
        """How often the graph was called; None where stock Inductor calls it, unseen by us."""
        if not self.counts_calls:
            return None
        # A counter's pickled form names its next value, without taking it.
        return int(self._calls.__reduce__()[1][0])

    def add(self, entries: list[Entry]) -> None:
        """Take over what the passes report for one (forward or backward) graph."""
        self.passes_ran = True
        self.entries.extend(entries)

    def named(self, action: str, child: str, read: Collection[str]) -> str | None:
        """Detail of the entry about module ``child``; None where there is none.

        A site is relative to what was compiled, a layer perhaps, and ``child`` to what is
        explained. Only where that makes them differ is one matched by its end: an entry at the
        name of another of the modules that the graph reads (``read``) is about that one.
        """
        entries = [e for e in (*self.simulated, *self.entries) if e.action == action]
        exact = [e for e in entries if e.site == child]
        sites = exact or [e for e in entries if e.site not in read and _is_about(e, child)]
        return max(sites, key=lambda e: len(e.site)).detail if sites else None

    def reads(self, tensors: set[int]) -> bool:
        """True if one of the graph's inputs is among ``tensors`` (ids of living tensors)."""
        return any(id(t) in tensors for ref in self.inputs if (t := ref()) is not None)


def _is_about(entry: Entry, name: str) -> bool:
    return f".{name}".endswith(f".{entry.site}") or f".{entry.site}".endswith(f".{name}")


def _is_weight(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.int8 or isinstance(tensor, torch.nn.Parameter)


class _Records:
    """All records of the process; those whose tensors are gone are dropped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: list[GraphRecord] = []

    def open(self, record: GraphRecord) -> None:
        with self._lock:
            self._records = [r for r in self._records if any(ref() is not None for ref in r.inputs)]
            self._records.append(record)

    def of(self, tensors: set[int]) -> list[GraphRecord]:
        with self._lock:
            return [r for r in self._records if r.reads(tensors)]


RECORDS = _Records()


@dataclass(frozen=True)
class Linear:
    """One linear layer in the report. ``status`` is int8, simulated or kept."""

    site: str
    status: str
    detail: str


@dataclass(frozen=True)
class Report:
    """The answer of :func:`explain`. Prints as a table; :meth:`to_dict` is for programs."""

    linears: tuple[Linear, ...]
    entries: tuple[Entry, ...]
    graphs: tuple[dict[str, Any], ...]

    def counts(self) -> dict[str, int]:
        """Number of linears: total, int8, simulated, kept."""
        by = {s: sum(x.status == s for x in self.linears) for s in ("int8", "simulated", "kept")}
        return {"total": len(self.linears), **by}

    def to_dict(self) -> dict[str, Any]:
        """For JSON: ``linears`` (counts), ``sites``, and lists of everything else."""
        rewrites = [asdict(e) for e in self.entries if e.action in ("checked", "fused")]
        simulated = [asdict(e) for e in self.entries if e.action == "simulated"]
        refusals = [asdict(e) for e in self.entries if e.action == "refused"]
        return {
            "compiled": bool(self.graphs),
            "linears": self.counts(),
            "sites": [asdict(x) for x in self.linears],
            "rewrites": rewrites,
            "simulated": simulated,
            "refusals": refusals,
            "graphs": list(self.graphs),
        }

    def __str__(self) -> str:
        from .report_table import render

        return render(self)


def explain(compiled: Any) -> Report:
    """Report on a model (or function) compiled with backend "qsim" or ``inductor_options()``.

    Args:
        compiled: what ``torch.compile`` returned, or a module whose ``compile()`` was called.

    Returns:
        A :class:`Report`. Before the first call nothing is compiled: it then says so, and lists the
        linears of the model as they will be handed to the compiler.

    Raises:
        ConfigError: ``compiled`` is neither a module nor a function that reaches one.
    """
    modules = list(_modules_of(compiled))
    records = _records_of(modules)
    entries = tuple(e for r in records for e in (*r.simulated, *r.entries))
    return Report(
        linears=tuple(_linears(modules, records)),
        entries=_unique(e for e in entries if e.action not in ("int8", "kept")),
        graphs=tuple(
            {
                "calls": r.calls,
                "isa": r.isa,
                "from_cache": r.from_cache,
                "graph_break": r.graph_break,
                "int8_kernels": sum(e.action == "int8" for e in r.entries),
            }
            for r in records
        ),
    )


def records_of(compiled: Any) -> list[GraphRecord]:
    """The records of the graphs of what ``torch.compile`` returned."""
    return _records_of(list(_modules_of(compiled)))


def _records_of(modules: list[torch.nn.Module]) -> list[GraphRecord]:
    return RECORDS.of(_ids(t for m in modules for t in _tensors(m)))


def _unique(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    return tuple(dict.fromkeys(entries))


def _modules_of(compiled: Any) -> Iterator[torch.nn.Module]:
    """The modules that a compiled object runs: itself, or what its function closes over."""
    from .errors import ConfigError

    original = getattr(compiled, "_orig_mod", compiled)
    if isinstance(original, torch.nn.Module):
        yield original
        return
    function = getattr(original, "_torchdynamo_orig_callable", original)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        yield owner
        return
    code = getattr(function, "__code__", None)
    if code is None:
        raise ConfigError(
            f"explain() was given a {type(compiled).__name__}. Give it what torch.compile(...) "
            "returned: a compiled module or function."
        )
    cells = [c.cell_contents for c in (function.__closure__ or ()) if _is_filled(c)]
    named = [function.__globals__[n] for n in code.co_names if n in function.__globals__]
    attributes = list(getattr(owner, "__dict__", {}).values())
    for held in (*cells, *named, *attributes):
        held = getattr(held, "_orig_mod", held)
        if isinstance(held, torch.nn.Module):
            yield held


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # the variable has no value yet
        return False


def _linears(modules: list[torch.nn.Module], records: list[GraphRecord]) -> Iterator[Linear]:
    """Every linear of the modules: int8 where a graph says so, else kept, with the reason."""
    from .smoothquant import QuantizedLinear, site_notes

    names = {name for module in modules for name, _ in module.named_modules() if name}
    for module in modules:
        notes = site_notes(module)
        linears = {
            name: child
            for name, child in module.named_modules()
            if isinstance(child, QuantizedLinear | torch.nn.Linear)
        }
        read = [{n for n, c in linears.items() if r.reads(_ids(_tensors(c)))} for r in records]
        for name, child in linears.items():
            reading = [(r, n) for r, n in zip(records, read, strict=True) if name in n]
            ran = None if _is_plain_float(child) else _detail("int8", name, reading)
            if isinstance(child, QuantizedLinear):
                if ran is not None:
                    yield Linear(name, "int8", ran)
                elif records:
                    yield Linear(name, "kept", "int8 weight, in no compiled graph: runs eagerly")
                else:
                    yield Linear(name, "int8", "int8 weight, not compiled yet")
            elif ran is not None:
                yield Linear(name, "int8", ran)
            elif (recipe := _detail("simulated", name, reading)) is not None:
                yield Linear(name, "simulated", recipe)
            else:
                kept = notes.get(name) or _detail("kept", name, reading)
                yield Linear(name, "kept", kept or "not quantized: convert() left it")
    # A graph module (an exported, PT2E-quantized model) has no Linear modules, only calls.
    calls = {
        e.site: Linear(e.site, e.action, e.detail)
        for r in records
        for e in r.entries
        if e.action in ("int8", "kept") and not any(_is_about(e, name) for name in names)
    }
    yield from calls.values()


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    return itertools.chain(module.parameters(), module.buffers())


def _ids(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {id(t) for t in tensors}


def _is_plain_float(module: torch.nn.Module) -> bool:
    """True where no int8 kernel can run the module, whatever site has its name.

    torchao keeps the Linear, and makes its weight a tensor of a class of its own.
    """
    plain = (torch.Tensor, torch.nn.Parameter)
    return all(type(t) in plain and t.is_floating_point() for t in _tensors(module))


def _detail(
    action: str, name: str, reading: Iterable[tuple[GraphRecord, Collection[str]]]
) -> str | None:
    """What the first graph that has an entry says about a module."""
    found = (record.named(action, name, read) for record, read in reading)
    return next((detail for detail in found if detail is not None), None)


def store_entries(path: Path, entries: list[Entry]) -> None:
    """Keep a graph's entries beside Inductor's cache, for a process that finds the graph there.

    Where they cannot be written they are not kept, and that process compiles the graph again.
    """
    # A forked process has its parent's thread identifiers.
    beside = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
    with contextlib.suppress(OSError):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps([asdict(e) for e in entries]), encoding="utf-8")
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def read_entries(path: Path) -> list[Entry] | None:
    """Read what :func:`store_entries` kept; None where there is nothing readable."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return [Entry(**row) for row in rows]
    except (OSError, ValueError, TypeError):
        return None


Reporter = Callable[[list[Entry]], None]
