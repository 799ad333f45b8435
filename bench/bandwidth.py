"""How fast the machine reads, by level of its memory, measured: passes over fitting arrays."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..capability import Capability
from .ceilings import run_program

DRAM_BYTES = 256 << 20
"""Eight times the largest L3 slice of today's cores; all of it is read by each pass."""

# Each thread reads an array of its own. Sixteen sums cover the latency of the additions, and the
# compiler writes vector code for them; that is quicker than any cache delivers.
_SOURCE = r"""
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>
using Vector = std::uint64_t __attribute__((vector_size(64)));
static void read(const Vector* data, long count, long passes, Vector* out) {
  Vector sums[8] = {};
  for (long pass = 0; pass < passes; ++pass) {
    for (long i = 0; i + 8 <= count; i += 8)
      for (int j = 0; j < 8; ++j) sums[j] ^= data[i + j];
    asm volatile("" : : : "memory");
  }
  for (int j = 1; j < 8; ++j) sums[0] ^= sums[j];
  *out = sums[0];
}
int main(int argc, char** argv) {
  const int threads = std::atoi(argv[1]);
  for (int argument = 2; argument < argc; ++argument) {
    const long bytes = std::atol(argv[argument]), count = bytes / 64;
    const long passes = std::max(1L, (1L << 30) / bytes);
    std::vector<Vector*> arrays;
    std::vector<Vector> results(threads);
    for (int i = 0; i < threads; ++i) {
      arrays.push_back(static_cast<Vector*>(std::aligned_alloc(64, count * 64)));
      for (long j = 0; j < count; ++j) arrays[i][j] = Vector{} + j;
    }
    double quickest = 1e9;
    for (int repeat = 0; repeat < 3; ++repeat) {
      auto start = std::chrono::steady_clock::now();
      std::vector<std::thread> team;
      for (int i = 0; i < threads; ++i)
        team.emplace_back(read, arrays[i], count, passes, &results[i]);
      for (auto& one : team) one.join();
      std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      if (took.count() < quickest) quickest = took.count();
    }
    std::printf("%ld %.2f\n", bytes, double(threads) * passes * count * 64 / quickest / 1e9);
    for (auto* array : arrays) std::free(array);
  }
  return 0;
}
"""


@dataclass(frozen=True)
class Level:
    """Reading speed of one level of memory.

    Attributes:
        name: L1, L2, L3 or DRAM.
        bytes: size of each thread's array.
        gb_s: 1e9 bytes a second, all threads together.
    """

    name: str
    bytes: int
    gb_s: float


def sizes(capability: Capability, threads: int) -> dict[str, int]:
    """Bytes a thread by level: half of it, which leaves room for whatever else lies there.

    L3 is shared, so threads divide it. A level of unknown size is left out.
    """
    found = {
        "L1": capability.l1d // 2,
        "L2": capability.l2 // 2,
        "L3": capability.l3 // 2 // threads,
        "DRAM": max(DRAM_BYTES, 4 * capability.l3) // threads,
    }
    return {name: size // 512 * 512 for name, size in found.items() if size >= 512}


@functools.cache
def measure(threads: int) -> list[Level]:
    """Measure every level with ``threads`` threads; about two seconds.

    Returns:
        Smallest level first; empty where no compiler can build the program.
    """
    wanted = sizes(Capability.detect(), threads)
    done = run_program(
        _SOURCE, [str(threads), *map(str, wanted.values())], flags=("-O3", "-march=native")
    )
    if done is None:
        return []
    speeds = [float(line.split()[1]) for line in done.splitlines()]
    return [
        Level(name, size, speed) for (name, size), speed in zip(wanted.items(), speeds, strict=True)
    ]
