"""What the machine's multiply units can do at most, measured: register-only loops, no memory.

A C++ program is compiled when it is asked for. The instructions are inline assembly, because
compilers that do not know the CPU put register moves around intrinsics (seen with GCC 12: half the
rate of vpdpbusd).
"""

from __future__ import annotations

import functools
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..capability import Capability, Isa, cpp_compiler

_HEAD = r"""
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>
template <class F> double best(int threads, F body) {
  double quickest = 1e9;
  for (int repeat = 0; repeat < 8; ++repeat) {
    auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> team;
    for (int i = 0; i < threads; ++i) team.emplace_back(body);
    for (auto& one : team) one.join();
    std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (took.count() < quickest) quickest = took.count();
  }
  return quickest;
}
int main(int, char** argv) {
  const int threads = std::atoi(argv[1]);
  const long loops = 2000000;
"""

# Twelve independent accumulators cover the latency (4 to 6 cycles) of two units a cycle.
_LOOP = r"""
  std::printf("{name} %.1f\n", threads * double(loops) * {ops} / best(threads, [=] {{
    long n = loops;
    asm volatile({zero} "1:\n" {body} "dec %0\njnz 1b" : "+r"(n) : : {clobbers}, "cc");
  }}) / 1e9);
"""


@dataclass(frozen=True)
class Ceilings:
    """Peaks of all threads together, in 1e9 operations a second; a multiply-add counts two.

    ``bf16`` and ``int8`` are 0 where the CPU has no instruction for them.
    """

    fp32: float
    bf16: float
    int8: float

    def to_dict(self) -> dict[str, float]:
        """The three values by name."""
        return asdict(self)


@dataclass(frozen=True)
class _Loop:
    """One accumulator's instructions. ``{acc}`` is its register, ``{tmp}`` a free one."""

    name: str
    text: tuple[str, ...]
    register: str
    operations: int
    accumulators: int = 12


def _loops(capability: Capability) -> list[_Loop]:
    if Isa.AVX512_VNNI in capability.isas:
        found = [
            _Loop("fp32", ("vfmadd231ps %%zmm30,%%zmm31,{acc}",), "zmm", 32),
            _Loop("int8", ("vpdpbusd %%zmm30,%%zmm31,{acc}",), "zmm", 128),
        ]
        if capability.avx512_bf16:
            found.append(_Loop("bf16", ("vdpbf16ps %%zmm30,%%zmm31,{acc}",), "zmm", 64))
        return found
    if Isa.AVX2 in capability.isas:
        # Exact int8 without VNNI widens to 16 bits: 16 products in one vpmaddwd, then an add.
        exact = ("vpmaddwd %%ymm14,%%ymm15,%%ymm13", "vpaddd %%ymm13,{acc},{acc}")
        return [
            _Loop("fp32", ("vfmadd231ps %%ymm14,%%ymm15,{acc}",), "ymm", 16),
            _Loop("int8", exact, "ymm", 32),
        ]
    return []


_CLEAR = {"zmm": "vpxord", "ymm": "vpxor"}


def _asm(lines: list[str]) -> str:
    return " ".join(f'"{line}\\n"' for line in lines)


def _source(loops: list[_Loop]) -> str:
    parts = [_HEAD]
    for loop in loops:
        names = [f"{loop.register}{i}" for i in range(loop.accumulators)]
        inputs = ("%%zmm30", "%%zmm31") if loop.register == "zmm" else ("%%ymm14", "%%ymm15")
        # Zeros first: what lies in a register could be a denormal, which some units take slowly.
        clear = [
            f"{_CLEAR[loop.register]} {r},{r},{r}" for r in (*(f"%%{n}" for n in names), *inputs)
        ]
        lines = [line.format(acc=f"%%{name}") for name in names for line in loop.text]
        # As clobbers, zmm registers go by their xmm names, which every compiler knows.
        used = [name[3:] for name in names] + (["13", "14", "15"] if loop.register == "ymm" else [])
        parts.append(
            _LOOP.format(
                name=loop.name,
                ops=loop.operations * loop.accumulators,
                zero=_asm(clear),
                body=_asm(lines),
                clobbers=", ".join(f'"xmm{number}"' for number in used),
            )
        )
    return "".join(parts) + "  return 0;\n}\n"


def run_program(
    text: str, arguments: Sequence[str], *, flags: Sequence[str] = ("-O2",)
) -> str | None:
    """Build a C++ program, run it, and return what it printed.

    Returns:
        None without a compiler that can build it: broken, or too old for an instruction. That costs
        the figures, not the bench.
    """
    compiler = cpp_compiler()
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="qinductor-ceilings-") as folder:
        source, program = Path(folder, "ceilings.cpp"), Path(folder, "ceilings")
        source.write_text(text, encoding="utf-8")
        command = [compiler, *flags, "-std=c++17", "-pthread", str(source), "-o", str(program)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return None
        return subprocess.run(
            [str(program), *arguments], check=True, capture_output=True, text=True
        ).stdout


@functools.cache
def measure(threads: int) -> Ceilings | None:
    """Measure the peaks with ``threads`` threads; about a second.

    Returns:
        None where no compiler can build the loops, or none is written for the CPU.
    """
    loops = _loops(Capability.detect())
    done = run_program(_source(loops), [str(threads)]) if loops else None
    if done is None:
        return None
    found = dict(line.split() for line in done.splitlines())
    return Ceilings(*(float(found.get(name, 0.0)) for name in ("fp32", "bf16", "int8")))
