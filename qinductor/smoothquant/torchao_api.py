"""What this package takes from torchao, imported in one place and quietly.

torchao tries to load shared libraries for accelerators when it is imported and logs a line for each
one that is missing; a user who quantizes for a CPU has no use for these lines.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def _muted(*names: str) -> Iterator[None]:
    """Raise the level of the named loggers for the length of a block."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


with _muted("torchao", "torch.utils._pytree", "root"):
    from torchao.core.config import AOBaseConfig
    from torchao.quantization import Int8Tensor, PerRow, PerTensor, quantize_
    from torchao.quantization.granularity import Granularity
    from torchao.quantization.quant_primitives import MappingType
    from torchao.quantization.transform_module import register_quantize_module_handler

__all__ = [
    "AOBaseConfig",
    "Granularity",
    "Int8Tensor",
    "MappingType",
    "PerRow",
    "PerTensor",
    "quantize_",
    "register_quantize_module_handler",
]
