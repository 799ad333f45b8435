"""qinductor: one quantization spec, two executions, as the torch.compile backend "qsim".

Importing the package compiles nothing and imports no part of torch._inductor: public names are
looked up on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import inductor_options, qsim
    from .capability import Capability, Isa
    from .config import QSimConfig
    from .errors import (
        BackwardThroughInt8Error,
        CalibrationError,
        CapabilityError,
        CompilerMissingError,
        ConfigError,
        ConversionError,
        ModelError,
        QInductorError,
        SavedModelError,
    )
    from .report import Report, explain
    from .smoothquant import SmoothQuantConfig, convert, load, prepare, quantize_model, save

__version__ = "0.1.0"

_HOMES: dict[str, tuple[str, ...]] = {
    "backend": ("inductor_options", "qsim"),
    "capability": ("Capability", "Isa"),
    "config": ("QSimConfig",),
    "errors": (
        "BackwardThroughInt8Error",
        "CalibrationError",
        "CapabilityError",
        "CompilerMissingError",
        "ConfigError",
        "ConversionError",
        "ModelError",
        "QInductorError",
        "SavedModelError",
    ),
    "report": ("Report", "explain"),
    "smoothquant": (
        "SmoothQuantConfig",
        "convert",
        "load",
        "prepare",
        "quantize_model",
        "save",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: PLE0604 - the names are the values of one table
    "__version__",
    *_HOME_OF,
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOME_OF[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
