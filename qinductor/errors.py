"""Exception classes of the package.

Every message names the offending value, the valid ones, and the way out. All classes derive from
:class:`QInductorError`; those that report a bad argument are ``ValueError`` too, so callers that
catch the built-in class keep working.
"""

from __future__ import annotations

from collections.abc import Iterable


class QInductorError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(QInductorError, ValueError):
    """An option, a mode or a field of a configuration is not valid."""


class UnknownOptionError(ConfigError):
    """An option name is not known. ``valid`` lists the names that are."""

    def __init__(self, kind: str, name: object, valid: Iterable[str]) -> None:
        self.kind = kind
        self.name = name
        self.valid = tuple(sorted(valid))
        super().__init__(f"unknown {kind} {name!r}. Valid: {', '.join(self.valid)}.")


class CapabilityError(QInductorError):
    """The machine lacks an instruction set that was asked for."""


class CompilerMissingError(QInductorError):
    """No usable C++ compiler was found."""


class ModelError(QInductorError, ValueError):
    """A model cannot be found, loaded, or quantized."""


class CalibrationError(QInductorError, ValueError):
    """Calibration data is missing, empty or not usable."""


class ConversionError(QInductorError, ValueError):
    """convert() was called on a model that is not ready for it."""


class SavedModelError(QInductorError, ValueError):
    """A saved directory is missing, corrupt, of a newer version, or in the way."""


class BackwardThroughInt8Error(QInductorError, RuntimeError):
    """A gradient was asked of an operator that has none. ``op`` names it."""

    def __init__(self, op: str) -> None:
        self.op = op
        super().__init__(
            f"{op} has no gradient: an int8 layer is for inference only. Train the float model and "
            "convert it afterwards, or detach the input of the int8 part."
        )


class NanActivationError(QInductorError, ValueError):
    """A tensor that is to be quantized holds a NaN, for which integers have no code."""

    def __init__(self, site: str, count: int) -> None:
        super().__init__(
            f"{count} NaN in the input of the quantizer at {site}. Look for it before that layer; "
            "without options={'check_nan': True} it would have become code 0."
        )
        self.site = site
