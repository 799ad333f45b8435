"""Where a compiled model's kernels stand under the machine's roofline.

The kernels are those of the running model, timed by Inductor's kernel profile inside torch's
profiler; the roof is measured by :mod:`.ceilings` and :mod:`.bandwidth`.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..errors import QInductorError
from . import bandwidth, ceilings, machine

if TYPE_CHECKING:
    from ..zoo import Batch, Loaded

CALLS = 10
"""Profiled calls of the model; a kernel's time is the median of all its calls."""

PROFILE = {"cpp.enable_kernel_profile": True}
"""Inductor's option that makes each C++ kernel report itself to torch's profiler."""

_KERNEL = re.compile(r"graph_\d+_(?P<name>.+)")
_LINEAR = re.compile(r"(?P<op>u8_s8_qlinear\w*?)__(?P<isa>\w+?)_(?P<n>\d+)_(?P<k>\d+)_kernel")
_ATTENTION = re.compile(r"(?P<op>\w*attention)__(?P<isa>\w+)_kernel")


@dataclass(frozen=True)
class Kernel:
    """One kernel of a model.

    Attributes:
        name: short; of a linear layer with its N × K.
        calls: of a call of the model.
        seconds: of one call.
        operations: multiply-adds × 2 of one call; 0 where the name does not tell.
        bytes: least traffic of one call: weights, rows read and rows written once; 0 likewise.
        unit: which peak applies, a field of :class:`.ceilings.Ceilings`; empty for none.
    """

    name: str
    calls: int
    seconds: float
    operations: int = 0
    bytes: int = 0
    unit: str = ""

    @property
    def gop_s(self) -> float:
        """1e9 operations a second."""
        return self.operations / self.seconds / 1e9

    @property
    def intensity(self) -> float:
        """Operations a byte; 0 where either is unknown."""
        return self.operations / self.bytes if self.bytes else 0.0


def kernel(
    event: str, calls: int, seconds: float, *, rows: int, sequence: int, hidden: int
) -> Kernel | None:
    """What the profiler's ``event`` was; None for an event that is no kernel.

    Args:
        event: its name; of an int8 linear layer N and K stand in it.
        calls: of a call of the model.
        seconds: of one call.
        rows: M, batch × sequence.
        sequence: tokens a row of the batch.
        hidden: heads × head size.
    """
    found = _KERNEL.fullmatch(event)
    if found is None:
        return None
    name = found["name"]
    if linear := _LINEAR.fullmatch(name):
        n, k = int(linear["n"]), int(linear["k"])
        # A byte a weight and an activation. Outputs are u8 to float32 and the name does not say
        # which: counted as u8, which is the least.
        return Kernel(
            f"{linear['op']} {n} × {k}", calls, seconds, 2 * rows * n * k, n * k + rows * (n + k),
            "int8",
        )  # fmt: skip
    if attention := _ATTENTION.fullmatch(name):
        # Scores and weighted values are rows × sequence × hidden multiply-adds each; bfloat16
        # queries, keys and values are read once, codes written.
        return Kernel(
            attention["op"], calls, seconds, 4 * rows * sequence * hidden, rows * hidden * 7, "bf16"
        )
    return Kernel(name, calls, seconds)


def compiled_kernels(
    loaded: Loaded, calibration: Batch, inputs: Batch, activation: str
) -> tuple[list[Kernel], float]:
    """Quantize, compile and profile a model.

    Returns:
        Its kernels, the dearest first, and the median seconds of a whole call (without profiler,
        yet with the kernels' own few nanoseconds of bookkeeping).

    Raises:
        QInductorError: the profile names no kernel.
    """
    import time

    import torch
    from torch.profiler import ProfilerActivity, profile

    import qinductor

    config = qinductor.SmoothQuantConfig(activation=activation)
    model = qinductor.quantize_model(loaded.model, [calibration], config)
    options: Any = {"inductor": PROFILE}
    run = torch.compile(model, backend="qsim", dynamic=False, options=options)
    whole = []
    with torch.no_grad():
        for _ in range(3):
            run(**inputs)
        for _ in range(CALLS):
            start = time.perf_counter()
            run(**inputs)
            whole.append(time.perf_counter() - start)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(CALLS):
                run(**inputs)
    times: dict[str, list[float]] = {}
    for event in profiler.events() or ():
        times.setdefault(event.name, []).append(event.cpu_time_total / 1e6)
    batch, sequence = inputs["input_ids"].shape
    model_config: Any = loaded.model.config
    kernels: list[Kernel] = []
    for name, seconds in times.items():
        found = kernel(
            name,
            max(1, len(seconds) // CALLS),
            statistics.median(seconds),
            rows=batch * sequence,
            sequence=sequence,
            hidden=model_config.hidden_size,
        )
        if found is not None:
            kernels.append(found)
    if not kernels:
        raise QInductorError(
            "the profile names no compiled kernel: Inductor's kernel profile works on Linux only."
        )
    return sorted(kernels, key=lambda k: -k.calls * k.seconds), statistics.median(whole)


def result_of(
    kernels: list[Kernel],
    model_s: float,
    header: dict[str, Any],
    bandwidths: list[bandwidth.Level],
) -> dict[str, Any]:
    """Plain JSON values: the machine's ceilings and what each kernel reaches of them.

    A kernel's share is of the int8 or bf16 peak; None where there is no peak, or no operation
    count.
    """
    peaks = header["peak_gop_s"] or {}
    rows = []
    for one in kernels:
        peak = peaks.get(one.unit, 0.0)
        rows.append(
            asdict(one)
            | {
                "gop_s": one.gop_s if one.operations else None,
                "gb_s": one.bytes / one.seconds / 1e9 if one.bytes else None,
                "intensity": one.intensity if one.bytes else None,
                "share_of_peak": one.gop_s / peak if one.operations and peak else None,
                "share_of_model": one.calls * one.seconds / model_s,
            }
        )
    return {
        "machine": header,
        "bandwidth_gb_s": [asdict(level) for level in bandwidths],
        "model_s": model_s,
        "kernels": rows,
    }


def measure(
    loaded: Loaded, calibration: Batch, inputs: Batch, *, activation: str, threads: int
) -> dict[str, Any]:
    """Measure the ceilings, then the model; see :func:`result_of`."""
    import torch

    torch.set_num_threads(threads)
    header = machine.machine_header(ceilings.measure(threads), threads)
    levels = bandwidth.measure(threads)
    kernels, model_s = compiled_kernels(loaded, calibration, inputs, activation)
    return result_of(kernels, model_s, header, levels)
