"""SimulationSpec: which format and rounding each role of each operation gets."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qinductor.errors import ConfigError, UnknownOptionError
from qinductor.numerics.arguments import BACKWARD
from qinductor.numerics.format_base import Format
from qinductor.numerics.named import parse_format
from qinductor.numerics.random_bits import lane_width
from qinductor.numerics.reference import check_format
from qinductor.numerics.rounding import Rounding

from .accumulator import Accumulator
from .operations import OPERATIONS, Role


@dataclass(frozen=True)
class Precision:
    """How one tensor is rounded.

    Attributes:
        format: a format, or its name or expression ("E4M3", "FixedPoint(8, 6)").
        rounding: one of the seven modes, or its name.
        random_bits: bits that decide a stochastic rounding, 1 to 32.
        backward: of a rounding in the forward pass: "identity", or "mask": no gradient where the
            tensor lies outside the range.

    Raises:
        ConfigError: a field is not valid.
    """

    format: Format
    rounding: Rounding = Rounding.TIES_TO_EVEN
    random_bits: int = 32
    backward: str = "identity"

    def __post_init__(self) -> None:
        given: object = self.format
        if isinstance(given, str):
            object.__setattr__(self, "format", parse_format(given))
        elif not isinstance(given, Format):
            raise ConfigError(f"format={given!r} is not a format; give one, or a name as 'E4M3'.")
        object.__setattr__(self, "rounding", as_rounding(self.rounding))
        lane_width(self.random_bits)
        if self.backward not in BACKWARD:
            raise ConfigError(f"backward={self.backward!r} is not valid. Valid: {BACKWARD}.")
        check_format(self.format, self.rounding)

    @property
    def stochastic(self) -> bool:
        """Whether it draws random bits."""
        return self.rounding is Rounding.STOCHASTIC

    def __str__(self) -> str:
        short = str(self.format)
        return short if self.rounding is Rounding.TIES_TO_EVEN else f"{short} {self.rounding.name}"


def as_rounding(value: object) -> Rounding:
    """A rounding mode, or the mode of that name.

    Raises:
        UnknownOptionError: there is none.
    """
    if isinstance(value, Rounding):
        return value
    names = Rounding.__members__
    if not isinstance(value, str) or value.upper() not in names:
        raise UnknownOptionError("rounding", value, names)
    return names[value.upper()]


Setting = Precision | Accumulator | None
"""What a rule says of a role; None: it is left in full precision."""


@dataclass(frozen=True, init=False)
class Rule:
    """Formats for the roles of the operations that it matches.

    ``Rule("encoder.*", op="linear", input="E4M3", grad_output=Precision("E5M2", "STOCHASTIC"))``

    Args:
        module: pattern (:mod:`fnmatch`) of the module's name as ``named_modules`` spells it; "" is
            the model itself.
        type: name of the module's class ("Conv2d"), or several; a base class counts.
        op: one or several of :data:`~qinductor.simulation.operations.OPERATIONS`.
        optional: matching nothing is no error.
        roles: a :class:`Precision`, a format, a format's name, or None for full precision; for
            ``accumulator`` an :class:`Accumulator`.

    Raises:
        ConfigError: an unknown op or role; a role that none of the ops has; no role at all.
    """

    module: str
    type: tuple[str, ...]
    op: tuple[str, ...]
    optional: bool
    roles: tuple[tuple[Role, Setting], ...]

    def __init__(
        self,
        module: str = "*",
        *,
        type: str | Iterable[str] = (),
        op: str | Iterable[str] = (),
        optional: bool = False,
        **roles: Any,
    ) -> None:
        put = object.__setattr__
        put(self, "module", module)
        put(self, "type", _names(type))
        put(self, "op", _names(op))
        put(self, "optional", bool(optional))
        for name in self.op:
            if name not in OPERATIONS:
                raise UnknownOptionError("operation", name, OPERATIONS)
        valid = {role.value: role for role in Role}
        settings = {}
        for name, value in roles.items():
            if name not in valid:
                raise UnknownOptionError(f"role in the rule for {module!r}", name, valid)
            settings[valid[name]] = _setting(valid[name], value)
        if not settings:
            raise ConfigError(f"the rule for {module!r} names no role. Valid: {', '.join(valid)}.")
        for role in settings:
            if self.op and not any(role in OPERATIONS[o] for o in self.op):
                has = sorted(r.value for o in self.op for r in OPERATIONS[o])
                raise ConfigError(
                    f"the rule for {module!r} gives a format to {role.value!r}, a role that "
                    f"{', '.join(self.op)} lacks. Its roles: {', '.join(dict.fromkeys(has))}."
                )
        put(self, "roles", tuple(settings.items()))

    def names(self, path: str, types: Iterable[str]) -> bool:
        """Whether it speaks of the module at ``path``."""
        return fnmatch.fnmatchcase(path, self.module) and (
            not self.type or bool(set(self.type) & set(types))
        )

    def matches(self, path: str, types: Iterable[str], op: str) -> bool:
        """Whether it applies to operation ``op`` in the module at ``path``."""
        return (
            (not self.op or op in self.op)
            and any(role in OPERATIONS[op] for role, _ in self.roles)
            and self.names(path, types)
        )

    def __str__(self) -> str:
        parts = [repr(self.module)]
        parts += [f"type={'|'.join(self.type)}"] if self.type else []
        parts += [f"op={'|'.join(self.op)}"] if self.op else []
        return f"Rule({', '.join(parts)})"


def _names(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _setting(role: Role, value: Any) -> Setting:
    if value is None:
        return None
    if (role is Role.ACCUMULATOR) != isinstance(value, Accumulator):
        want = "an Accumulator" if role is Role.ACCUMULATOR else "a Precision or a format"
        if role is Role.ACCUMULATOR or isinstance(value, Accumulator):
            raise ConfigError(f"role {role.value!r} takes {want}, not {value!r}.")
    return value if isinstance(value, Precision | Accumulator) else Precision(value)


@dataclass(frozen=True)
class SimulationSpec:
    """Rules; for each role of an operation the last rule that matches and names the role counts.

    Attributes:
        rules: in order; later rules win.
        seed: of the random bits; None draws one from torch's generator.
        name: for reports.

    Raises:
        ConfigError: no rule, or something that is no rule.
    """

    rules: tuple[Rule, ...]
    seed: int | None = None
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        rules: Any = (self.rules,) if isinstance(self.rules, Rule) else tuple(self.rules)
        object.__setattr__(self, "rules", rules)
        if not rules or not all(isinstance(r, Rule) for r in rules):
            raise ConfigError("SimulationSpec needs at least one Rule, and rules only.")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> SimulationSpec:
        """A recipe by name: fp8, mxfp8, mxfp6, mxfp4, nvfp4, int8, bf16, fp16, block8, wage.

        Raises:
            UnknownOptionError: there is none of that name; the message lists them.
        """
        from .presets import preset

        return preset(name, **changes)

    def and_then(self, *rules: Rule) -> SimulationSpec:
        """This spec with more rules after its own; they win."""
        return SimulationSpec((*self.rules, *rules), self.seed, self.name)

    def resolve(
        self, path: str, types: Iterable[str], op: str
    ) -> tuple[dict[Role, Precision], Accumulator | None, tuple[int, ...]]:
        """What ``op`` in the module at ``path`` gets.

        Returns:
            Formats by role, the accumulator, and the numbers of the rules that matched.
        """
        found: dict[Role, Setting] = {}
        matched = []
        types = tuple(types)
        for number, rule in enumerate(self.rules):
            if rule.matches(path, types, op):
                matched.append(number)
                found |= {r: s for r, s in rule.roles if r in OPERATIONS[op]}
        accumulator = found.pop(Role.ACCUMULATOR, None)
        assert accumulator is None or isinstance(accumulator, Accumulator)
        roles = {r: s for r, s in found.items() if isinstance(s, Precision)}
        return roles, accumulator, tuple(matched)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as JSON and TOML hold it."""
        from .text import spec_to_dict

        return spec_to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SimulationSpec:
        """The inverse of :meth:`to_dict`.

        Raises:
            ConfigError: something in it is unknown or not valid.
        """
        from .text import spec_from_dict

        return spec_from_dict(data)

    def save(self, path: str | Path) -> None:
        """Write to a .toml or .json file."""
        from .text import save_spec

        save_spec(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> SimulationSpec:
        """Read a .toml or .json file.

        Raises:
            ConfigError: the file is absent, or not a spec.
        """
        from .text import load_spec

        return load_spec(Path(path))
