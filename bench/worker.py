"""A process that holds one variant of one model and times it when it is told to."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import qinductor

from ..errors import QInductorError
from . import peers
from .memory import Memory, Meter


class VariantError(QInductorError):
    """A variant could not be built or run; the message says why."""


@dataclass(frozen=True)
class Job:
    """What a worker is made for; all of it plain values, since it travels to another process.

    Attributes:
        model: name for :func:`qinductor.zoo.load_model`.
        variant: value of :class:`qinductor.bench.variants.Variant`.
        threads: for torch.
        sequence: length of the calibration batch.
        calibration: name of its texts (see :func:`qinductor.text.corpus`), None for the best.
        isa, max_autotune: see :func:`qinductor.bench.variants.compiled`.
    """

    model: str
    variant: str
    threads: int
    sequence: int
    calibration: str | None = None
    isa: str | None = None
    max_autotune: bool = False


@dataclass(frozen=True)
class Built:
    """A shape that is ready to be timed.

    Attributes:
        compile_s: seconds of the first call, compilation included.
        calls: calls a sample.
        pooled: (B, H) float32 numpy array, the mean of the token vectors, to compare variants by.
        linear_operations: multiply-adds × 2 of all Linears of the float model, at this shape.
        packages: versions of what a peer needs; empty for the others.
    """

    compile_s: float
    calls: int
    pooled: Any
    linear_operations: int
    packages: dict[str, str] = field(default_factory=dict)


CALIBRATION_ROWS = 8


class _Holder:
    """The worker's side: the model, and the shape that is compiled now."""

    def __init__(self, job: Job) -> None:
        import torch

        from .. import text, zoo
        from ..cli.console import quiet_libraries
        from .variants import Variant, engine

        quiet_libraries()
        torch.set_num_threads(job.threads)
        torch.manual_seed(0)
        self.job, self.variant = job, Variant(job.variant)
        self.loaded = zoo.load_model(job.model)
        self.float_model = self.loaded.model
        self.texts = text.corpus(job.calibration).texts if self.loaded.tokenizer else ()
        batch = self._rows(CALIBRATION_ROWS, job.sequence)
        self.linears = self._linear_sizes()
        self.engine = engine(
            self.variant,
            self.loaded,
            batch,
            threads=job.threads,
            isa=job.isa,
            max_autotune=job.max_autotune,
        )
        self.call: Any = None
        self.calls = 1
        self.meter, self.metered_calls = Meter(), 0

    def _rows(self, batch: int, sequence: int, *, later: bool = False) -> Any:
        """Full rows of text, or of random ids where there is no tokenizer.

        Args:
            batch: number of rows.
            sequence: tokens a row.
            later: take the second half of the texts, which calibration did not see.
        """
        from .. import zoo

        if not self.texts:
            return zoo.random_batch(self.loaded, batch, sequence, seed=int(later))
        half = len(self.texts) // 2
        texts = self.texts[half:] + self.texts[:half] if later else self.texts
        return zoo.packed_batch(self.loaded, texts, batch, sequence)

    def _linear_sizes(self) -> dict[str, tuple[int, int]]:
        from torch import nn

        return {
            name: (module.in_features, module.out_features)
            for name, module in self.float_model.named_modules()
            if isinstance(module, nn.Linear)
        }

    def shape(self, batch: int, sequence: int) -> Built:
        """Compile for (batch, sequence), warm up, and say how it went."""
        import torch

        from .harness import calls_per_sample

        inputs = self._rows(batch, sequence, later=True)
        start = time.perf_counter()
        call = self.engine.ready(inputs)
        hidden = torch.as_tensor(call())
        compile_s = time.perf_counter() - start
        rows = batch * sequence
        # A pooler reads one row a sequence; every other Linear of an encoder reads all of them.
        operations = sum(
            2 * k * n * (batch if name.split(".")[0] == "pooler" else rows)
            for name, (k, n) in self.linears.items()
        )
        pooled = hidden.float().mean(1).numpy()
        del hidden
        self.call, self.calls = call, calls_per_sample(call)
        self.meter.start()
        self.metered_calls = 0
        peer = peers.find(self.job.variant)
        return Built(
            compile_s, self.calls, pooled, operations, peer.versions() if peer is not None else {}
        )

    def sample(self) -> float:
        """Take one sample; seconds a call."""
        from .harness import sample

        self.metered_calls += self.calls + 1  # sample() makes one that it does not time
        return sample(self.call, self.calls)

    def memory(self) -> Memory:
        """What the samples since :meth:`shape` took."""
        return self.meter.read(self.metered_calls)


def serve(descriptor: int) -> None:
    """Answer the parent until it hangs up: (method, arguments) -> (ok, value).

    Args:
        descriptor: of this end of the pipe, inherited. The first message is the :class:`Job`.
    """
    pipe = Connection(descriptor)
    job: Job = pipe.recv()
    holder: _Holder | None = None
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if method == "load":
                peer = peers.find(job.variant)
                if peer is not None:
                    peer.require()
                holder = _Holder(job)
                pipe.send((True, None))
            else:
                pipe.send((True, getattr(holder, method)(*arguments)))
        except peers.MissingPeerError as error:
            pipe.send((False, error))
        except Exception as error:  # told to the parent, which decides
            pipe.send((False, VariantError(_described(error))))


def _described(error: Exception) -> str:
    """Our own messages whole; of others the first line, the class and the place."""
    if isinstance(error, QInductorError):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__} in {place}: {first_line}"


def _with_this_package(environment: dict[str, str]) -> dict[str, str]:
    """Put this checkout first on the path of another Python, which may not have it installed."""
    folder = str(Path(qinductor.__file__).resolve().parent.parent)
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([folder, inherited] if inherited else [folder])
    return environment


class Worker:
    """The parent's handle of a process that holds one variant. Use it in a with statement."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._loaded = False
        self._pipe, theirs = multiprocessing.Pipe()
        # Not multiprocessing.Process: it hands its own sys.path down, and a peer has another one.
        program = f"from {__name__} import serve; serve({theirs.fileno()})"
        self._process = subprocess.Popen(
            [peers.python(job.variant), "-c", program],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # standard output is for the result; libraries chat on it
            env=_with_this_package(os.environ.copy()),
        )
        theirs.close()
        # A process that has ended already is told by the first request.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._pipe.send(job)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, method: str, *arguments: object) -> Any:
        try:
            self._pipe.send((method, arguments))
            ok, value = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            code = self._process.wait(timeout=5)
            raise VariantError(
                f"the process of {self.job.variant} ended with code {code} "
                "(killed for memory, perhaps: try a smaller --batch)."
            ) from None
        if ok:
            return value
        raise value

    def load(self) -> None:
        """Load and quantize the model, once.

        Raises:
            VariantError: it failed; the message says why.
            MissingPeerError: a peer whose packages are not installed.
        """
        if not self._loaded:
            self._ask("load")
            self._loaded = True

    def shape(self, batch: int, sequence: int) -> Built:
        """Compile and warm up for (batch, sequence).

        Raises:
            VariantError: see :meth:`load`.
        """
        built: Built = self._ask("shape", batch, sequence)
        return built

    def sample(self) -> float:
        """Take one sample; seconds a call.

        Raises:
            VariantError: see :meth:`load`.
        """
        return float(self._ask("sample"))

    def memory(self) -> Memory:
        """What the samples since the last :meth:`shape` took.

        Raises:
            VariantError: see :meth:`load`.
        """
        found: Memory = self._ask("memory")
        return found
