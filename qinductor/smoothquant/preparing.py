"""prepare: a float model's copy with observers in."""

from __future__ import annotations

import copy

from torch import nn

from ..errors import ConversionError
from .calibration import CALIBRATION_ATTRIBUTE, Calibration
from .config import SmoothQuantConfig
from .eligibility import linears, refusals
from .sites import SITES_ATTRIBUTE
from .steps import observe


def prepare(model: nn.Module, config: SmoothQuantConfig | None = None) -> nn.Module:
    """Return a copy of a float model with observers in, otherwise unchanged, in eval mode.

    Run the copy on representative batches, called exactly as the model itself is called; give the
    attention mask, so that padding moves no statistic. Then :func:`convert` it.

    Args:
        model: any module with Linears. It is left alone; tied parameters stay tied in the copy.
        config: the recipe; None for the default one.

    Raises:
        ModelError: there is no Linear that could become int8.
        ConversionError: the model is prepared or int8 already.
        ConfigError: a skip pattern matches no module.
    """
    config = SmoothQuantConfig() if config is None else config
    if getattr(model, CALIBRATION_ATTRIBUTE, None) is not None:
        raise ConversionError("the model is prepared already: calibrate it and call convert().")
    if getattr(model, SITES_ATTRIBUTE, None) is not None:
        raise ConversionError("the model is int8 already: prepare the float model instead.")
    kept = refusals(model, config)
    prepared = copy.deepcopy(model).eval()
    calibration = Calibration(prepared, config, kept)
    setattr(prepared, CALIBRATION_ATTRIBUTE, calibration)
    chosen = {name: linear for name, linear in linears(prepared).items() if name not in kept}
    observe(prepared, calibration, chosen)
    return prepared
