"""A drop-in for QPyTorch 0.3.0 (`qtorch`): its modules and names, on this package's quantizers.

``from qinductor.qtorch.quant import float_quantize`` instead of ``from qtorch.quant import …``, or
an unchanged script: ``python -m qinductor.qtorch SCRIPT [ARGUMENTS]``. Nothing is compiled at
import; functions work under torch.compile; docs/numerics.md lists the differences.
"""

from __future__ import annotations

import importlib
import sys

from .number import BlockFloatingPoint, FixedPoint, FloatingPoint, Number

__all__ = ["BlockFloatingPoint", "FixedPoint", "FloatingPoint", "Number", "install"]

_MODULES = {
    "qtorch": "qinductor.qtorch",
    "qtorch.number": "qinductor.qtorch.number",
    "qtorch.quant": "qinductor.qtorch.quant",
    "qtorch.quant.quant_function": "qinductor.qtorch.quant",
    "qtorch.quant.quant_module": "qinductor.qtorch.quant",
    "qtorch.optim": "qinductor.qtorch.optim",
    "qtorch.optim.optim_low": "qinductor.qtorch.optim",
    "qtorch.auto_low": "qinductor.qtorch.auto_low",
    "qtorch.auto_low.auto_low": "qinductor.qtorch.auto_low",
}
"""QPyTorch's modules, and what serves them."""


def install() -> None:
    """Let ``import qtorch`` and its submodules mean this package, in this process.

    Raises:
        RuntimeError: another qtorch is imported already.
    """
    present = sys.modules.get("qtorch")
    if present is not None and present is not sys.modules[__name__]:
        raise RuntimeError(
            "qtorch is imported already. Call qinductor.qtorch.install() before the first "
            "`import qtorch`, or run the script with python -m qinductor.qtorch."
        )
    for theirs, ours in _MODULES.items():
        sys.modules[theirs] = importlib.import_module(ours)
