"""The simulation of one model: its seed, its step counter, its sites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qinductor.errors import ConfigError
from qinductor.numerics.random_bits import site_hash

from .accumulator import Accumulator
from .operations import Role
from .spec import Precision, SimulationSpec

Calls = Counter[tuple[str, str]]
"""How often each (module path, operation) was met."""


class Place(NamedTuple):
    """Where a call happens: the module's path, and the names of its class and base classes."""

    path: str
    types: tuple[str, ...]


class Settings(NamedTuple):
    """What one operation at one place gets."""

    roles: Mapping[Role, Precision]
    accumulator: Accumulator | None

    def __bool__(self) -> bool:
        return bool(self.roles) or self.accumulator is not None

    def __str__(self) -> str:
        parts = [f"{role.value} {p}" for role, p in self.roles.items()]
        if self.accumulator is not None:
            parts.append(f"accumulator {self.accumulator}")
        return ", ".join(parts)


class Site(NamedTuple):
    """One rounding: where, of which operation and role, and at which call of the forward pass."""

    path: str
    op: str
    role: str
    call: int

    def __str__(self) -> str:
        return f"{self.path or '(model)'}: {self.op} {self.role} #{self.call}"


class Simulation:
    """A spec with its seed, its step counter and the sites that were met.

    Attributes:
        spec: the rules.
        seed, step: 0-d int64 tensors. ``step`` counts outermost forward passes; the one that is
            running rounds with the count before it.
        sites: every site met, with its precision.
    """

    def __init__(self, spec: SimulationSpec) -> None:
        self.spec = spec
        drawn = torch.randint(0, 2**62, ()) if spec.seed is None else torch.tensor(spec.seed)
        self.seed: Tensor = drawn.to(torch.int64)
        self.step: Tensor = torch.zeros((), dtype=torch.int64)
        self.sites: dict[Site, Precision | Accumulator] = {}
        self.watchers: list[Any] = []
        self.root = Place("", ())
        self._numbers: dict[int, Site] = {}
        self._settings: dict[tuple[Place, str], Settings] = {}
        self._matched: set[int] = set()
        self._running: set[Any] = set()
        self._starts: dict[Any, Calls] = {}
        self._counts: dict[Any, Calls] = {}
        self._traces: Counter[Any] = Counter()

    def settings(self, place: Place, op: str) -> Settings:
        """What ``op`` gets at a place; remembers which rules matched."""
        key = (place, op)
        if key not in self._settings:
            roles, accumulator, matched = self.spec.resolve(place.path, place.types, op)
            self._matched.update(matched)
            self._settings[key] = Settings(roles, accumulator)
        return self._settings[key]

    def number(self, site: Site, precision: Precision | Accumulator, rank: int) -> int:
        """The 32-bit number of a site. All but weights mix in the data-parallel rank.

        Raises:
            ConfigError: two sites collide (32-bit hashes).
        """
        shared = not rank or site.role.startswith((Role.WEIGHT.value, Role.BIAS.value))
        role = site.role if shared else f"{site.role}@{rank}"
        number = site_hash(site.path, site.op, role, site.call)
        other = self._numbers.setdefault(number, site)
        if other != site:
            raise ConfigError(f"the sites {site} and {other} collide; rename one of the modules.")
        self.sites[site] = precision
        return number

    def sites_by_number(self) -> dict[str, int]:
        """The 32-bit number of every site met, by its text."""
        return {str(site): number for number, site in self._numbers.items()}

    def begin(self, part: Any = None) -> Tensor:
        """Start a forward pass, or go on with it; returns its step, a tensor of its own.

        ``part`` names one of several graphs that a forward pass may consist of: one that is called
        again begins the next pass. None always does.
        """
        if part is None or part in self._running or not self._running:
            self._running.clear()
            self.step = self.step + 1
        if part is not None:
            self._running.add(part)
        return self.step - 1

    def open_part(self, compilation: tuple[Any, Any] | None) -> tuple[Any, Calls]:
        """Name a graph that is being compiled, and the calls that came before it in its pass.

        A forward pass with graph breaks is several graphs: one for each frame, and each of those
        perhaps in pieces. They are compiled in the order in which they first run.

        Args:
            compilation: (frame, trace): a number that all compilations of a frame share, and one of
                this compilation. None: a graph of its own.
        """
        if compilation is None:
            return object(), Counter()
        frame, trace = compilation
        part = (frame, self._traces[trace])
        self._traces[trace] += 1
        if part not in self._starts:
            earlier = self._running | {(frame, piece) for piece in range(part[1])}
            self._starts[part] = sum((self._counts.get(p, Counter()) for p in earlier), Counter())
        return part, self._starts[part]

    def close_part(self, part: Any, calls: Calls) -> None:
        """Remember how many calls a graph holds."""
        self._counts[part] = calls

    def unmatched(self) -> list[int]:
        """Numbers of the rules that have matched no operation yet and are not optional."""
        rules = enumerate(self.spec.rules)
        return [i for i, r in rules if i not in self._matched and not r.optional]

    def check_matched(self, places: Iterable[Place], ops: Iterable[tuple[str, str]] = ()) -> None:
        """Raise for a rule that matched nothing.

        Args:
            places: of the model's modules.
            ops: (path, operation) pairs that were seen.

        Raises:
            ConfigError: with the nearest names that there are.
        """
        from .matching import nothing_matches

        for number in self.unmatched():
            raise ConfigError(nothing_matches(self.spec.rules[number], list(places), set(ops)))

    def state_dict(self) -> dict[str, Any]:
        """Seed and step as tensors, and the spec as plain data."""
        return {
            "seed": self.seed.clone(),
            "step": self.step.clone(),
            "spec": self.spec.to_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken.

        Raises:
            ConfigError: it is of another spec (the message names the first rule that differs), or
                is no state of a simulation.
        """
        missing = [k for k in ("seed", "step", "spec") if k not in state]
        if missing:
            raise ConfigError(f"this is no state_dict of a simulation: it lacks {missing}.")
        saved = SimulationSpec.from_dict(state["spec"])
        if saved.rules != self.spec.rules:
            raise ConfigError(_difference(saved, self.spec))
        self.seed = state["seed"].to(torch.int64).clone()
        self.step = state["step"].to(torch.int64).clone()
        self._running.clear()


def _difference(saved: SimulationSpec, present: SimulationSpec) -> str:
    pairs = list(zip(saved.rules, present.rules, strict=False))
    number = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))

    def said(spec: SimulationSpec) -> str:
        rules = spec.to_dict()["rule"]
        return str(rules[number]) if number < len(rules) else "(no such rule)"

    return (
        f"the state_dict is of another spec: rule {number} was {said(saved)} when it was saved and "
        f"is {said(present)} now. Load it with SimulationSpec.from_dict(state['spec']), or start "
        "a new run."
    )


def place_of(path: str, module: nn.Module | type | str) -> Place:
    """The place of a module, or of a class as Dynamo remembers it."""
    if isinstance(module, str):
        return Place(path, (module.rpartition(".")[2],))
    kind = module if isinstance(module, type) else type(module)
    names = tuple(c.__name__ for c in kind.__mro__ if issubclass(c, nn.Module))
    return Place(path, names or (kind.__name__,))
