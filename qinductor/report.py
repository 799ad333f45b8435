"""What was fused, what runs as int8, what was left alone, and why.

The backend opens one :class:`GraphRecord` for every graph it compiles; :func:`explain` gathers those
of one compiled model into a :class:`Report`.
"""

from __future__ import annotations

import itertools
import json
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .passes.base import Entry


@dataclass
class GraphRecord:
    """One compiled graph.

    Attributes:
        inputs: the tensors the graph was compiled with, weakly: how it is found by its model.
        isa: name of the instruction set that templates were capped to.
        graph_break: why Dynamo ended the graph here, or None.
        entries: what the passes did; empty until they ran or their entries were read back.
        from_cache: the graph came from Inductor's cache.
        counts_calls: the graph is called through the backend, which counts.
    """

    inputs: tuple[weakref.ref[torch.Tensor], ...]
    isa: str
    graph_break: str | None = None
    entries: list[Entry] = field(default_factory=list)
    passes_ran: bool = False
    from_cache: bool = False
    counts_calls: bool = True
    _calls: Iterator[int] = field(default_factory=itertools.count)

    def count_call(self) -> None:
        """Add one call. One step of an iterator, which is atomic between threads."""
        next(self._calls)

    @property
    def calls(self) -> int | None:
        """How often the graph was called; None where stock Inductor calls it, unseen by us."""
        if not self.counts_calls:
            return None
        # A counter's pickled form names its next value, without taking it.
        return int(self._calls.__reduce__()[1][0])  # type: ignore[index]

    def add(self, entries: list[Entry]) -> None:
        """Take over what the passes report for one (forward or backward) graph."""
        self.passes_ran = True
        self.entries.extend(entries)

    def reads(self, tensors: set[int]) -> bool:
        """True if one of the graph's inputs is among ``tensors`` (ids of living tensors)."""
        return any(id(t) in tensors for ref in self.inputs if (t := ref()) is not None)


class _Records:
    """All records of the process; those whose tensors are gone are dropped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: list[GraphRecord] = []

    def open(self, record: GraphRecord) -> None:
        with self._lock:
            self._records = [
                r for r in self._records if any(ref() is not None for ref in r.inputs)
            ]
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
        """JSON-serialisable: ``linears`` (counts), ``sites``, ``rewrites``, ``refusals``, ``graphs``."""
        rewrites = [asdict(e) for e in self.entries if e.action == "fused"]
        refusals = [asdict(e) for e in self.entries if e.action == "refused"]
        return {
            "compiled": bool(self.graphs),
            "linears": self.counts(),
            "sites": [asdict(x) for x in self.linears],
            "rewrites": rewrites,
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
    tensors = {
        id(t) for m in modules for t in itertools.chain(m.parameters(), m.buffers())
    }
    records = RECORDS.of(tensors)
    entries = tuple(e for r in records for e in r.entries)
    return Report(
        linears=tuple(_linears(modules, entries, bool(records))),
        entries=_unique(e for e in entries if e.action in ("fused", "refused")),
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
    cells = [c.cell_contents for c in (function.__closure__ or ())]
    named = [function.__globals__[n] for n in code.co_names if n in function.__globals__]
    for held in (*cells, *named):
        held = getattr(held, "_orig_mod", held)
        if isinstance(held, torch.nn.Module):
            yield held


def _linears(
    modules: list[torch.nn.Module], entries: tuple[Entry, ...], compiled: bool
) -> Iterator[Linear]:
    """Every linear of the modules: int8 where a graph says so, else kept, with the reason."""
    from .smoothquant import QuantizedLinear, site_notes

    ran = {e.site: e.detail for e in entries if e.action == "int8"}
    kept = {e.site: e.detail for e in entries if e.action == "kept"}
    for module in modules:
        notes = site_notes(module)
        for name, child in module.named_modules():
            if isinstance(child, QuantizedLinear):
                if name in ran:
                    yield Linear(name, "int8", ran[name])
                elif compiled:
                    yield Linear(name, "kept", "int8 weight, in no compiled graph: runs eagerly")
                else:
                    yield Linear(name, "int8", "int8 weight, not compiled yet")
            elif isinstance(child, torch.nn.Linear):
                if name in ran:
                    yield Linear(name, "int8", ran[name])
                    continue
                reason = notes.get(name) or kept.get(name) or "not quantized: convert() left it"
                yield Linear(name, "kept", reason)


def store_entries(path: Path, entries: list[Entry]) -> None:
    """Keep a graph's entries beside Inductor's cache, for a process that finds the graph there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{threading.get_ident()}.tmp")
    beside.write_text(json.dumps([asdict(e) for e in entries]), encoding="utf-8")
    beside.replace(path)


def read_entries(path: Path) -> list[Entry] | None:
    """Read what :func:`store_entries` kept; None where there is nothing readable."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return [Entry(**row) for row in rows]
    except (OSError, ValueError, TypeError):
        return None


Reporter = Callable[[list[Entry]], None]
