"""The header of every result: which machine, which software, how busy."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from typing import Any

from ..capability import Capability, cpp_compiler
from .ceilings import Ceilings

PACKAGES = ("torch", "torchao", "transformers", "qinductor")


def _cpuinfo() -> dict[str, str]:
    """First processor's lines of /proc/cpuinfo; empty where there is no such file."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            block = file.read().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in block.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def compiler_version() -> str | None:
    """First line of ``c++ --version``, or None without a compiler."""
    compiler = cpp_compiler()
    if compiler is None:
        return None
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0] if done.stdout else compiler


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine_header(ceilings: Ceilings | None, threads: int) -> dict[str, Any]:
    """Describe this machine, as plain JSON values.

    Args:
        ceilings: its measured peaks, None where they could not be measured.
        threads: number of threads that torch was given.
    """
    capability = Capability.detect()
    info = _cpuinfo()
    return {
        "cpu": capability.cpu_name,
        "cpu_family_model": f"{info.get('cpu family', '?')}/{info.get('model', '?')}",
        "processors": capability.cores,
        "threads": threads,
        "isas": [isa.value for isa in capability.isas],
        "avx512_bf16": capability.avx512_bf16,
        "amx_int8": capability.amx_int8,
        "cache_bytes": {"l1d": capability.l1d, "l2": capability.l2, "l3": capability.l3},
        "peak_gop_s": None if ceilings is None else ceilings.to_dict(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "compiler": compiler_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "load_before": round(os.getloadavg()[0], 2),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def describe(header: dict[str, Any]) -> str:
    """One line of a header, for titles and captions."""
    peaks = header.get("peak_gop_s")
    peak = f", int8 peak {peaks['int8']:.0f} G op/s" if peaks else ""
    return (
        f"{header['cpu']} (family/model {header['cpu_family_model']}), "
        f"{header['threads']} threads, {header['isas'][0]}{peak}, "
        f"torch {header['packages']['torch']}, {header['date']}"
    )
