"""A spec as TOML and JSON.

A tensor's precision is a format's name or expression, or a table of Precision's fields; "none"
means full precision.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qinductor.errors import ConfigError, UnknownOptionError
from qinductor.numerics.format_base import Format
from qinductor.numerics.named import NAMED
from qinductor.numerics.rounding import Rounding

from .accumulator import Accumulator
from .operations import Role
from .spec import Precision, Rule, Setting, SimulationSpec

NONE = "none"


def spec_to_dict(spec: SimulationSpec) -> dict[str, Any]:
    """Plain data: strings, numbers, lists and dictionaries."""
    data: dict[str, Any] = {}
    if spec.name:
        data["name"] = spec.name
    if spec.seed is not None:
        data["seed"] = spec.seed
    data["rule"] = [_rule_to_dict(rule) for rule in spec.rules]
    return data


def _rule_to_dict(rule: Rule) -> dict[str, Any]:
    data: dict[str, Any] = {"module": rule.module}
    if rule.type:
        data["type"] = list(rule.type)
    if rule.op:
        data["op"] = list(rule.op)
    if rule.optional:
        data["optional"] = True
    return data | {role.value: _setting_to_data(s) for role, s in rule.roles}


def _setting_to_data(setting: Setting) -> Any:
    if setting is None:
        return NONE
    data = {
        f.name: _plain(getattr(setting, f.name))
        for f in dataclasses.fields(setting)
        if f.name == "format" or getattr(setting, f.name) != f.default
    }
    return data["format"] if len(data) == 1 and isinstance(setting, Precision) else data


def _plain(value: Any) -> Any:
    if isinstance(value, Format):
        return value.name if NAMED.get(value.name) == value else value.key
    return value.name if isinstance(value, Rounding) else value


def spec_from_dict(data: Mapping[str, Any]) -> SimulationSpec:
    """Read what :func:`spec_to_dict` wrote."""
    valid = ("name", "seed", "rule")
    for key in data:
        if key not in valid:
            raise UnknownOptionError("key of a simulation spec", key, valid)
    rules = data.get("rule", ())
    if not isinstance(rules, list | tuple) or not all(isinstance(r, Mapping) for r in rules):
        raise ConfigError(f"'rule' of a simulation spec must be a list of tables, not {rules!r}.")
    return SimulationSpec(
        tuple(_rule_from_dict(r) for r in rules), data.get("seed"), data.get("name", "")
    )


def _rule_from_dict(data: Mapping[str, Any]) -> Rule:
    arguments = dict(data)
    for role in Role:
        if role.value in arguments:
            arguments[role.value] = _setting_from_data(role, arguments[role.value])
    return Rule(**arguments)


def _setting_from_data(role: Role, value: Any) -> Setting:
    if value == NONE:
        return None
    kind: type[Precision | Accumulator] = Accumulator if role is Role.ACCUMULATOR else Precision
    fields = {"format": value} if isinstance(value, str) else dict(value)
    valid = [f.name for f in dataclasses.fields(kind)]
    for key in fields:
        if key not in valid:
            raise UnknownOptionError(f"key of role {role.value!r}", key, valid)
    if "format" not in fields:
        raise ConfigError(f"role {role.value!r} has no 'format': {fields}.")
    return kind(**fields)


def save_spec(spec: SimulationSpec, path: Path) -> None:
    """Write .json, else TOML.

    Raises:
        ConfigError: the suffix is neither .toml nor .json.
    """
    data = spec_to_dict(spec)
    if _suffix(path) == ".json":
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        return
    lines = [f"{key} = {_toml(data[key])}" for key in ("name", "seed") if key in data]
    for rule in data["rule"]:
        lines += ["", "[[rule]]", *(f"{key} = {_toml(value)}" for key, value in rule.items())]
    path.write_text("\n".join(lines).strip() + "\n", encoding="utf-8")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    # JSON's strings, numbers and booleans are TOML's.
    return json.dumps(value)


def load_spec(path: Path) -> SimulationSpec:
    """Read .json or .toml."""
    suffix = _suffix(path)
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if suffix == ".json" else _read_toml(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid {suffix[1:].upper()}: {error}.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no table of rules.")
    return spec_from_dict(data)


def _read_toml(text: str) -> Any:
    if sys.version_info < (3, 11):
        raise ConfigError("reading TOML needs Python 3.11; save the spec as .json instead.")
    import tomllib

    return tomllib.loads(text)


def _suffix(path: Path) -> str:
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"{path} must end in .toml or .json.")
    return path.suffix
