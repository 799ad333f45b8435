"""SmoothQuant on torchao: observers, prepare and convert, folding of scales, saved models.

Names are looked up on first use: loading a saved model needs no torchao, whose import takes longer
than everything else here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import SmoothQuantConfig
    from .converting import convert, quantize_model
    from .interop import from_torchao
    from .linear import QuantizedLinear
    from .loading import load
    from .preparing import prepare
    from .saving import save
    from .sites import Fold, Site, site_notes

_HOME_OF = {
    "Fold": "sites",
    "QuantizedLinear": "linear",
    "Site": "sites",
    "SmoothQuantConfig": "config",
    "convert": "converting",
    "from_torchao": "interop",
    "load": "loading",
    "prepare": "preparing",
    "quantize_model": "converting",
    "save": "saving",
    "site_notes": "sites",
}

__all__ = [
    "Fold",
    "QuantizedLinear",
    "Site",
    "SmoothQuantConfig",
    "convert",
    "from_torchao",
    "load",
    "prepare",
    "quantize_model",
    "save",
    "site_notes",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
