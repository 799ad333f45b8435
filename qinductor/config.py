"""Options of the backend, validated once and frozen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from .capability import Isa
from .errors import ConfigError, UnknownOptionError

if TYPE_CHECKING:
    from .simulation import Simulation, SimulationSpec


@dataclass(frozen=True)
class QSimConfig:
    """What ``torch.compile(model, backend="qsim", options={...})`` accepts.

    Attributes:
        isa: best instruction set that CPU templates may use (its name or an :class:`Isa`). None
            takes the best that the machine has. One that the machine lacks is refused.
        disable: names of graph passes that are not to run.
        check_nan: raise :class:`qinductor.NanActivationError`, which names the site, when a NaN is
            to be quantized. Costs a pass over every quantized tensor. Without it a fixed scale
            makes it code 0, and only the residual path keeps it; a scale of a token becomes NaN.
        inductor: stock Inductor options, passed on as they are.
        simulate: a :class:`qinductor.SimulationSpec` to train with, or the handle that
            :func:`qinductor.simulate` returned: its seed and step are then shared. One spec object
            has one seed and one step; give each of several models a handle.
    """

    isa: Isa | None = None
    disable: tuple[str, ...] = ()
    check_nan: bool = False
    inductor: Mapping[str, Any] = field(default_factory=dict)
    simulate: SimulationSpec | Simulation | None = None

    def __post_init__(self) -> None:
        if self.isa is not None:
            object.__setattr__(self, "isa", Isa.parse(self.isa))
        if not isinstance(self.check_nan, bool):
            raise ConfigError(f"check_nan={self.check_nan!r} is not True or False.")
        disable: object = self.disable
        if isinstance(disable, str):
            raise ConfigError(
                f"disable={disable!r} is a string. Give a tuple of pass names: "
                f"disable=({disable!r},)."
            )
        if not isinstance(disable, Iterable) or not all(isinstance(name, str) for name in disable):
            raise ConfigError(
                f"disable={disable!r} is not a tuple of pass names, such as "
                "disable=('fuse_activation',)."
            )
        inductor: object = self.inductor
        if not isinstance(inductor, Mapping) or not all(isinstance(name, str) for name in inductor):
            raise ConfigError(
                f"inductor={inductor!r} is not a mapping of Inductor's options by name, such as "
                "inductor={'cpp_wrapper': True}."
            )
        object.__setattr__(self, "disable", tuple(sorted(set(self.disable))))
        object.__setattr__(self, "inductor", dict(self.inductor))
        if self.simulate is not None:
            from .simulation import Simulation, SimulationSpec

            if not isinstance(self.simulate, SimulationSpec | Simulation):
                raise ConfigError(
                    f"simulate={self.simulate!r} is no spec. Give a SimulationSpec, for example "
                    "SimulationSpec.preset('fp8'), or what qinductor.simulate() returned."
                )

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None) -> QSimConfig:
        """Build a config from ``torch.compile``'s ``options``.

        Raises:
            UnknownOptionError: a key is not a field of this class; the message lists the fields.
            ConfigError: a value is not valid.
        """
        options = dict(options or {})
        valid = {f.name for f in fields(cls)}
        for name in options:
            if name not in valid:
                raise UnknownOptionError("option of backend 'qsim'", name, valid)
        config = cls(**options)
        config._check_names()
        return config

    def _check_names(self) -> None:
        """Check the names that only other modules know: passes, and Inductor's options."""
        from torch._inductor import config as inductor_config

        from .passes import PASSES

        passes = {p.name for p in PASSES if p.optional}
        for name in self.disable:
            if name not in passes:
                raise UnknownOptionError("pass that can be disabled", name, passes)
        for name in self.inductor:
            # Not get_config_copy(): it leaves out the options that are no part of the cache key.
            # Nor an attribute's name: that may be a section ("cpp"), or what the module imports.
            try:
                inductor_config.get_type(name)  # type: ignore[attr-defined]
            except KeyError:
                raise ConfigError(
                    f"unknown Inductor option {name!r} in options['inductor']. Valid: the keys of "
                    "torch._inductor.config.get_config_copy(), as 'cpp_wrapper' or 'cpp.threads'."
                ) from None

    def cache_key(self) -> str:
        """Text that changes whenever generated code may have to.

        Inductor's own options are part of its own cache key already, and what is simulated is
        written in the graph.
        """
        return f"{self.isa} {self.disable} {self.check_nan}"


def mode_options(mode: str | None) -> dict[str, Any]:
    """Inductor options that a ``torch.compile`` mode stands for.

    Raises:
        UnknownOptionError: ``mode`` is not one of Inductor's modes; the message lists them.
    """
    if mode is None:
        return {}
    import torch._inductor

    valid: dict[str, dict[str, Any]] = torch._inductor.list_mode_options()
    if mode not in valid:
        raise UnknownOptionError("mode", mode, valid)
    return dict(valid[mode])
