"""qinductor: one quantization spec, two executions, as the torch.compile backend "qsim".

Importing the package compiles nothing and imports no part of torch._inductor: public names are
looked up on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # `X as X` tells type checkers that the name is exported.
    from .backend import (
        inductor_options as inductor_options,
    )
    from .backend import (
        qsim as qsim,
    )
    from .capability import (
        Capability as Capability,
    )
    from .capability import (
        Isa as Isa,
    )
    from .config import (
        QSimConfig as QSimConfig,
    )
    from .errors import (
        BackwardThroughInt8Error as BackwardThroughInt8Error,
    )
    from .errors import (
        CalibrationError as CalibrationError,
    )
    from .errors import (
        CapabilityError as CapabilityError,
    )
    from .errors import (
        CompilerMissingError as CompilerMissingError,
    )
    from .errors import (
        ConfigError as ConfigError,
    )
    from .errors import (
        ConversionError as ConversionError,
    )
    from .errors import (
        ModelError as ModelError,
    )
    from .errors import (
        NanActivationError as NanActivationError,
    )
    from .errors import (
        QInductorError as QInductorError,
    )
    from .errors import (
        SavedModelError as SavedModelError,
    )
    from .gpu import (
        lay_out as lay_out,
    )
    from .numerics import (
        MX as MX,
    )
    from .numerics import (
        NVFP4 as NVFP4,
    )
    from .numerics import (
        BlockFloatingPoint as BlockFloatingPoint,
    )
    from .numerics import (
        FixedPoint as FixedPoint,
    )
    from .numerics import (
        FloatingPoint as FloatingPoint,
    )
    from .numerics import (
        Integer as Integer,
    )
    from .numerics import (
        Posit as Posit,
    )
    from .numerics import (
        Quantizer as Quantizer,
    )
    from .numerics import (
        Rounding as Rounding,
    )
    from .numerics import (
        Table as Table,
    )
    from .numerics import (
        compare as compare,
    )
    from .numerics import (
        decode as decode,
    )
    from .numerics import (
        describe as describe,
    )
    from .numerics import (
        encode as encode,
    )
    from .numerics import (
        quantize as quantize,
    )
    from .numerics import (
        quantize_ as quantize_,
    )
    from .report import (
        Report as Report,
    )
    from .report import (
        explain as explain,
    )
    from .simulation import (
        Accumulator as Accumulator,
    )
    from .simulation import (
        Precision as Precision,
    )
    from .simulation import (
        Rule as Rule,
    )
    from .simulation import (
        SimulationSpec as SimulationSpec,
    )
    from .simulation import (
        observe as observe,
    )
    from .simulation import (
        simulate as simulate,
    )
    from .smoothquant import (
        SmoothQuantConfig as SmoothQuantConfig,
    )
    from .smoothquant import (
        convert as convert,
    )
    from .smoothquant import (
        from_torchao as from_torchao,
    )
    from .smoothquant import (
        load as load,
    )
    from .smoothquant import (
        prepare as prepare,
    )
    from .smoothquant import (
        quantize_model as quantize_model,
    )
    from .smoothquant import (
        save as save,
    )

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
        "NanActivationError",
        "QInductorError",
        "SavedModelError",
    ),
    "numerics": (
        "BlockFloatingPoint",
        "FixedPoint",
        "FloatingPoint",
        "Integer",
        "MX",
        "NVFP4",
        "Posit",
        "Quantizer",
        "Rounding",
        "Table",
        "compare",
        "decode",
        "describe",
        "encode",
        "quantize",
        "quantize_",
    ),
    "gpu": ("lay_out",),
    "report": ("Report", "explain"),
    "simulation": ("Accumulator", "Precision", "Rule", "SimulationSpec", "observe", "simulate"),
    "smoothquant": (
        "SmoothQuantConfig",
        "convert",
        "from_torchao",
        "load",
        "prepare",
        "quantize_model",
        "save",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "__version__",
    *_HOME_OF,
]


_ROOMS = ("optim", "simulation")
"""Parts that are used under their own name: ``qinductor.optim.LowPrecision``."""


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    try:
        home = _HOME_OF[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
