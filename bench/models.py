"""How fast is a whole model, and how near to its float self? All variants in the same rounds.

``python -m qinductor.bench.models`` measures what the README shows and writes results/models.json;
``qinductor bench`` is the same for any model and shape.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from . import ceilings, machine, peers
from .harness import MIN_ROUNDS, Timing, interleave
from .memory import Memory
from .variants import STANDARD, Variant
from .worker import Built, Job, VariantError, Worker

RESULTS = Path(__file__).resolve().parent / "results"

Progress = Callable[[str, int, int], None]
"""Told (what, done, of how many)."""


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        model: name for :func:`qinductor.zoo.load_model`.
        shapes: (batch, sequence) pairs.
        variants: in the order of the table; EAGER is what ratios refer to and always runs.
        rounds: samples of each variant.
        threads: for torch.
        calibration, isa, max_autotune: see :class:`qinductor.bench.worker.Job`.
    """

    model: str
    shapes: tuple[tuple[int, int], ...]
    threads: int
    variants: tuple[Variant, ...] = STANDARD
    rounds: int = MIN_ROUNDS
    calibration: str | None = None
    isa: str | None = None
    max_autotune: bool = False

    def __post_init__(self) -> None:
        if not self.shapes or min(min(shape) for shape in self.shapes) < 1:
            raise ValueError(f"batch and sequence have to be at least 1, got {self.shapes}.")
        if Variant.EAGER not in self.variants:
            object.__setattr__(self, "variants", (Variant.EAGER, *self.variants))


@dataclass
class _Run:
    """Workers that are alive, and by variant what went wrong or is missing with the others."""

    workers: dict[Variant, Worker]
    errors: dict[Variant, str] = field(default_factory=dict)
    missing: dict[Variant, str] = field(default_factory=dict)

    def each(
        self, action: Callable[[Worker], Any], told: Callable[[int, int], None]
    ) -> dict[Variant, Any]:
        """Run ``action`` on every live worker, two at a time; a failing one is put aside."""
        found: dict[Variant, Any] = {}

        def attempt(item: tuple[Variant, Worker]) -> None:
            variant, worker = item
            try:
                found[variant] = action(worker)
            except peers.MissingPeerError as error:
                self.missing[variant] = str(error)
            except VariantError as error:
                self.errors[variant] = str(error)
            gone = len(self.errors) + len(self.missing)
            told(len(found) + gone, len(self.workers) + gone)

        # Compilers are mostly single-threaded: two side by side halve the wait. Nothing is timed.
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(attempt, list(self.workers.items())))
        for variant in (*self.errors, *self.missing):
            self.workers.pop(variant, None)
        if Variant.EAGER in self.errors:
            raise VariantError(self.errors[Variant.EAGER])
        return found


def cosine(a: Any, b: Any) -> float:
    """Smallest cosine between matching rows of two (B, H) arrays."""
    a, b = a.astype(numpy.float64), b.astype(numpy.float64)
    norms = numpy.linalg.norm(a, axis=1) * numpy.linalg.norm(b, axis=1)
    return float(((a * b).sum(1) / norms).min())


def _row(
    request: Request,
    shape: tuple[int, int],
    variant: Variant,
    timings: dict[str, Timing],
    built: dict[Variant, Built],
    memory: Memory,
    peaks: ceilings.Ceilings | None,
) -> dict[str, Any]:
    batch, sequence = shape
    timing, eager = timings[variant.value], timings[Variant.EAGER.value]
    best_fp32 = min(
        (timings[v.value] for v in Variant if v.is_fp32 and v.value in timings),
        key=lambda candidate: candidate.median,
    )
    speed = built[Variant.EAGER].linear_operations / timing.median / 1e9
    return {
        "model": request.model,
        "batch": batch,
        "seq": sequence,
        "variant": variant.value,
        "median_s": timing.median,
        "min_s": timing.min,
        "spread": timing.spread,
        "speedup_vs_eager": timing.ratio_to(eager),
        "speedup_vs_best_fp32": timing.ratio_to(best_fp32),
        "tokens_per_s": batch * sequence / timing.median,
        "linear_gop_s": speed,
        "share_of_int8_peak": speed / peaks.int8 if peaks and peaks.int8 else None,
        "cosine_vs_eager": cosine(built[variant].pooled, built[Variant.EAGER].pooled),
        "compile_s": built[variant].compile_s,
        "peak_rss_bytes": memory.peak_rss,
        "page_faults_per_call": memory.page_faults,
        "packages": built[variant].packages,
        "samples_s": list(timing.seconds),
    }


@contextlib.contextmanager
def _workers(request: Request) -> Iterator[_Run]:
    """Start the workers, eager first: a model that cannot be loaded ends the run at once."""
    longest = max(sequence for _, sequence in request.shapes)
    with contextlib.ExitStack() as stack:

        def start(variant: Variant) -> Worker:
            job = Job(
                model=request.model,
                variant=variant.value,
                threads=request.threads,
                sequence=longest,
                calibration=request.calibration,
                isa=request.isa,
                max_autotune=request.max_autotune,
            )
            return stack.enter_context(Worker(job))

        eager = start(Variant.EAGER)
        eager.load()
        yield _Run({v: eager if v is Variant.EAGER else start(v) for v in request.variants})


def measure(request: Request, told: Progress = lambda what, done, total: None) -> dict[str, Any]:
    """Measure every shape with every variant.

    Returns:
        {"machine": header, "rows": [one a shape and variant], "errors": [{variant, batch, seq,
        error}], "missing": [{model, variant, reason}]}; a variant that cannot run here is an error
        entry, a peer that is not installed a missing one; neither is the end of the others.

    Raises:
        VariantError: the eager model itself cannot be loaded or run.
    """
    peaks = ceilings.measure(request.threads)
    header = machine.machine_header(peaks, request.threads)
    rows: list[dict[str, Any]] = []
    errors: list[dict[str, Any]] = []
    with _workers(request) as run:
        run.each(Worker.load, lambda done, total: told("loading and quantizing", done, total))
        for shape in request.shapes:
            batch, sequence = shape
            label = f"batch {batch} × {sequence}"
            built: dict[Variant, Built] = run.each(
                lambda worker, shape=shape: worker.shape(*shape),  # type: ignore[misc]
                lambda done, total, label=label: told(f"compiling, {label}", done, total),  # type: ignore[misc]
            )
            done_rounds = iter(range(1, request.rounds + 1))
            timings = interleave(
                {variant.value: worker.sample for variant, worker in run.workers.items()},
                rounds=request.rounds,
                after_round=lambda label=label, done_rounds=done_rounds: told(  # type: ignore[misc]
                    f"timing, {label}", next(done_rounds), request.rounds
                ),
            )
            memory = run.each(Worker.memory, lambda done, total: None)
            for variant in request.variants:
                if variant in memory:
                    rows.append(
                        _row(request, shape, variant, timings, built, memory[variant], peaks)
                    )
                elif variant in run.errors:
                    errors.append(
                        {
                            "variant": variant.value,
                            "batch": batch,
                            "seq": sequence,
                            "error": run.errors[variant],
                        }
                    )
        missing = [
            {"model": request.model, "variant": variant.value, "reason": reason}
            for variant, reason in run.missing.items()
        ]
    return {"machine": header, "rows": rows, "errors": errors, "missing": missing}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the README's models and write results/models.json."""
    import argparse

    import torch

    from ..zoo import MINILM

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--models", nargs="+", default=[MINILM, "bert-base"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--peers", action="store_true", help="the peers too")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS)
    parser.add_argument("--output", type=Path, default=RESULTS / "models.json")
    arguments = parser.parse_args(argv)
    shapes = tuple((batch, arguments.seq) for batch in arguments.batch)
    variants = tuple(Variant) if arguments.peers else STANDARD
    whole: dict[str, Any] = {}
    for name in arguments.models:
        found = measure(
            Request(name, shapes, torch.get_num_threads(), variants, arguments.rounds),
            lambda what, done, total, name=name: print(
                f"{name}: {what} {done}/{total}", flush=True
            ),  # type: ignore[misc]
        )
        whole.setdefault("machine", found["machine"])
        for key in ("rows", "errors", "missing"):
            whole.setdefault(key, []).extend(found[key])
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
