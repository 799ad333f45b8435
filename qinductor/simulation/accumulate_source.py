"""C++ of the matmul with a simulated accumulator: the definition's operations, over many columns.

The lanes are columns of the result, so each lane adds in the stated order, whatever the number of
threads and of lanes. Roundings are printed from the one rule in :mod:`qinductor.numerics.rounding`,
over GCC's vector types: a loop over int64 elements is not vectorised by GCC 12, since C++ narrows
the counts of shifts to int.
"""

from __future__ import annotations

import functools

from qinductor.numerics.carrier import Carrier, Word
from qinductor.numerics.expressions import CExpression, CLanes
from qinductor.numerics.format_base import Format
from qinductor.numerics.formats import FixedPoint, FloatingPoint
from qinductor.numerics.grids import grid_of
from qinductor.numerics.rounding import Lane, Rounding, quantize_bits

from .accumulator import Accumulator

BYTES = 64
"""Of a vector: one AVX-512 register, two of AVX2."""
VECTORS = 8
"""Vectors worked at once: their chains of dependent operations overlap."""
ROWS = 32
"""Rows for which a tile of the second operand is packed once."""


class VectorLanes(CLanes):
    """C++ over vectors ``I`` of integers; a condition is a vector of masks."""

    def lift(self, value: Lane, like: CExpression) -> CExpression:
        """An int in every lane."""
        if isinstance(value, CExpression):
            return value
        text = f"{value + 1}LL - 1" if value < 0 else f"{value}LL"
        return CExpression(self, f"splat({text})", like.kind)


@functools.lru_cache(maxsize=256)
def accumulate_source(accumulator: Accumulator, carrier: Carrier) -> str:
    """C++ of ``run``; ``carrier`` is the dtype that products and sums are held in."""
    word = carrier.word
    integer, real = ("int32_t", "float") if word.bits == 32 else ("int64_t", "double")
    formats = [f for f in (accumulator.format, accumulator.outer, accumulator.product) if f]
    functions = "".join(
        _rounding(f"round_{i}", f, accumulator.rounding, carrier) for i, f in enumerate(formats)
    )
    names = {f: f"round_{i}" for i, f in reversed(list(enumerate(formats)))}
    inner = names[accumulator.format]
    outer = names[accumulator.outer or accumulator.format]
    product = names[accumulator.product] if accumulator.product else ""
    step = _one_by_one(product, inner)
    if accumulator.aligned_bits:
        step = _aligned(accumulator, product, inner, word)
    chunk = accumulator.chunk
    return f"""
#include <cstdint>
#include <cstring>
#include <new>
using Integer = {integer}; using Real = {real};
typedef Integer I __attribute__((vector_size({BYTES})));
typedef Real F __attribute__((vector_size({BYTES})));
constexpr int LANES = {BYTES * 8 // word.bits}, VECTORS = {VECTORS}, TILE = LANES * VECTORS;
constexpr int ROWS = {ROWS};
static inline I splat(int64_t x) {{ return I{{}} + (Integer)x; }}
static inline I float_bits(I k) {{ return (I)__builtin_convertvector(k, F); }}
static inline F magnitude(F x) {{ return (F)((I)x & splat({word.magnitude}LL)); }}
// a + b rounded to odd: what any narrower format rounds as it would round the exact sum
// (Boldo and Melquiond, Emulation of FMA and Correctly Rounded Sums, 2008). The error term is
// Knuth's.
static inline F odd_sum(F a, F b) {{
  const F s = a + b, v = s - a, e = (a - (s - v)) + (b - v);
  const I bits = (I)s, up = (((I)e ^ bits) >> {word.bits - 1}) | 1;
  return (F)(bits + (((e > 0) | (e < 0)) & up & ((bits & 1) - 1)));
}}
{functions}
static inline void add_up(F* acc, const F* packed, const float* left, int64_t begin, int64_t end) {{
  F part[VECTORS];
#pragma GCC unroll {VECTORS}
  for (int v = 0; v < VECTORS; ++v) part[v] = acc[v];
  {step}
#pragma GCC unroll {VECTORS}
  for (int v = 0; v < VECTORS; ++v) acc[v] = part[v];
}}
// (batch, m, k) x (batch, k, n) -> (batch, m, n), row-major.
extern "C" void run(const float* a, const float* b, float* out, int64_t batch, int64_t m,
                    int64_t n, int64_t k, int threads) {{
  const int64_t tiles = (n + TILE - 1) / TILE, groups = (m + ROWS - 1) / ROWS;
#pragma omp parallel num_threads(threads) if(threads > 1)
  {{
    F* const packed = new (std::align_val_t({BYTES})) F[k * VECTORS];
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < batch * tiles * groups; ++task) {{
      const int64_t which = task / (tiles * groups), tile = task / groups % tiles;
      const int64_t first = task % groups * ROWS;
      const int64_t last = first + ROWS < m ? first + ROWS : m;
      const int64_t width = n - tile * TILE < TILE ? n - tile * TILE : TILE;
      const float* source = b + which * k * n + tile * TILE;
      for (int64_t i = 0; i < k; ++i) {{
        Real line[TILE];
        for (int64_t j = 0; j < TILE; ++j) line[j] = j < width ? (Real)source[i * n + j] : (Real)0;
        std::memcpy((void*)(packed + i * VECTORS), line, sizeof line);
      }}
      for (int64_t row = first; row < last; ++row) {{
        const float* left = a + (which * m + row) * k;
        F acc[VECTORS] = {{}}, total[VECTORS] = {{}};
        const int64_t chunk = {chunk or "k"};
        for (int64_t begin = 0; begin < k; begin += chunk) {{
          add_up(acc, packed, left, begin, begin + chunk < k ? begin + chunk : k);
          if ({int(bool(chunk))})
            for (int v = 0; v < VECTORS; ++v) {{
              total[v] = {outer}(odd_sum(total[v], acc[v])); acc[v] = F{{}};
            }}
        }}
        Real line[TILE];
        std::memcpy(line, {"total" if chunk else "acc"}, sizeof line);
        float* target = out + (which * m + row) * n + tile * TILE;
        for (int64_t j = 0; j < width; ++j) target[j] = (float)line[j];
      }}
    }}
    ::operator delete[]((void*)packed, std::align_val_t({BYTES}));
  }}
}}
"""


def _rounding(name: str, fmt: Format, mode: Rounding, carrier: Carrier) -> str:
    """A function that rounds every lane."""
    assert isinstance(fmt, FloatingPoint | FixedPoint)
    m = VectorLanes(carrier.word)
    result = quantize_bits(m, m.name("bits"), grid_of(fmt, carrier, mode), mode, carrier.word)
    lines = "\n  ".join(m.lines)
    return f"""static inline F {name}(F x) {{
  const I bits = (I)x;
  {lines}
  return (F)({result.text});
}}
"""


def _one_by_one(product: str, inner: str) -> str:
    return f"""for (int64_t i = begin; i < end; ++i) {{
    const Real x = (Real)left[i];
#pragma GCC unroll {VECTORS}
    for (int v = 0; v < VECTORS; ++v)
      part[v] = {inner}(odd_sum(part[v], {product}(x * packed[i * VECTORS + v])));
  }}"""


def _aligned(accumulator: Accumulator, product: str, inner: str, word: Word) -> str:
    """Groups of products and the accumulator, cut to the bits below their largest exponent.

    What is scaled by the quantum's inverse lies below 2^48, so the conversion to integers is exact;
    lanes that are not finite are summed as they are.
    """
    bits, size = accumulator.aligned_bits, accumulator.aligned_group
    assert bits is not None
    return f"""for (int64_t i = begin; i < end; i += {size}) {{
    const int64_t stop = i + {size} < end ? i + {size} : end;
#pragma GCC unroll {VECTORS}
    for (int v = 0; v < VECTORS; ++v) {{
      F terms[{size}], largest = magnitude(part[v]), plain = part[v];
      for (int64_t l = i; l < stop; ++l) {{
        const F p = {product}((Real)left[l] * packed[l * VECTORS + v]), size = magnitude(p);
        terms[l - i] = p; plain += p;
        largest = largest > size ? largest : size;
      }}
      // 2^(E + 1 - n), and its inverse.
      const I field = (I)largest >> {word.man};
      const F quantum = (F)((field + {1 - bits}) << {word.man});
      const F inverse = (F)(({2 * word.bias - 1 + bits} - field) << {word.man});
      I sum = __builtin_convertvector(part[v] * inverse, I);
      for (int64_t l = i; l < stop; ++l) sum += __builtin_convertvector(terms[l - i] * inverse, I);
      const F cut = __builtin_convertvector(sum, F) * quantum;
      const F exact = magnitude(plain) <= (F)splat({word.inf - 1}LL) ? cut : plain;
      part[v] = largest == 0 ? part[v] : {inner}(exact);
    }}
  }}"""
