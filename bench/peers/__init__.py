"""Other people's int8 runtimes, as further variants of the bench: what each needs, and its code.

A peer runs in a process of its own, with the Python that has its packages: the one that the
environment variable ``QINDUCTOR_PEERS_PYTHON`` names, else ``.venv-peers`` in the checkout (set up
by ``make peers``), else the Python that is running. It loads the same weights and gets the same
rows, calibration batch and number of threads as every other variant.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import ConfigError, QInductorError

if TYPE_CHECKING:
    from ...zoo import Batch, Loaded

PYTHON_VARIABLE = "QINDUCTOR_PEERS_PYTHON"


class MissingPeerError(QInductorError):
    """A peer's packages are not installed; the message names them and the way out."""


class Engine(Protocol):
    """A quantized model, before its shapes are known."""

    def ready(self, inputs: Batch) -> Callable[[], Any]:
        """Compile for the shapes of ``inputs``.

        Returns:
            A function of nothing that runs the model on ``inputs`` and returns its last hidden
            state, (B, S, H), as a tensor or a numpy array.
        """


@dataclass(frozen=True)
class Peer:
    """Another int8 runtime.

    Attributes:
        variant: value of its :class:`qinductor.bench.variants.Variant`.
        packages: distributions that it needs; each is imported by the same name.
        module: of this package; its ``build(loaded, calibration, threads, variant)`` returns an
            :class:`Engine`. None for a variant of torch itself, which needs no other Python.
    """

    variant: str
    packages: tuple[str, ...]
    module: str | None

    def require(self) -> None:
        """Check that this Python has the packages; imports none of them.

        Raises:
            MissingPeerError: one is absent.
        """
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if absent:
            raise MissingPeerError(
                f"{self.variant} needs {', '.join(absent)}, not installed here. Run `make peers`, "
                f"or name a Python that has it in {PYTHON_VARIABLE}."
            )

    def versions(self) -> dict[str, str]:
        """Versions of the packages, in this Python."""
        return {name: importlib.metadata.version(name) for name in self.packages}

    def build(self, loaded: Loaded, calibration: Batch, threads: int) -> Engine:
        """Quantize the model of ``loaded``, calibrated on one batch."""
        module = importlib.import_module(f".{self.module}", __name__)
        engine: Engine = module.build(loaded, calibration, threads, self.variant)
        return engine


PEERS = (
    Peer("openvino-int8", ("openvino", "nncf"), "openvino_int8"),
    Peer("onnxruntime-dynamic", ("onnxruntime", "onnx"), "onnxruntime_int8"),
    Peer("onnxruntime-static", ("onnxruntime", "onnx"), "onnxruntime_int8"),
    Peer("ctranslate2-int8", ("ctranslate2",), "ctranslate2_int8"),
    Peer("torchao-static-max-autotune", ("torchao",), None),
)


def find(variant: str) -> Peer | None:
    """The peer that ``variant`` names; None for a variant that is none."""
    return next((peer for peer in PEERS if peer.variant == variant), None)


def python(variant: str) -> str:
    """The Python that a process of ``variant`` has to run.

    Raises:
        ConfigError: ``QINDUCTOR_PEERS_PYTHON`` names no file.
    """
    peer = find(variant)
    if peer is None or peer.module is None:
        return sys.executable
    named = os.environ.get(PYTHON_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise ConfigError(f"{PYTHON_VARIABLE}={named!r} is no file. Unset it or mend it.")
        return named
    # Not resolved: a virtual environment's python is a link, and its own path says which it is.
    beside = Path(__file__).resolve().parents[2] / ".venv-peers" / "bin" / "python"
    return str(beside) if beside.is_file() else sys.executable
