// int8 GEMM for AVX-512 VNNI: a 6 x 64 register tile, 24 accumulators of 16 columns.
//
// Per group of four k: four loads of weights, six broadcasts of activations, 24 vpdpbusd. The
// instruction is written as inline assembly, because GCC 12 copies the accumulator around the
// intrinsic, which halves the rate.
#ifndef QINDUCTOR_INT8_GEMM_AVX512_VNNI_H
#define QINDUCTOR_INT8_GEMM_AVX512_VNNI_H
#include <immintrin.h>

namespace qinductor {

struct Avx512Vnni {
  static constexpr int rows = 6;

  static inline void dot(__m512i& acc, __m512i a, __m512i b) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  }

  // Rows [row, end) of a panel. The epilogue of a tile runs between the products of the next one: its
  // additions, conversions and stores go to units that the products leave idle.
  template <class P>
  static void block(const Args<P>& a, const Panel<P>& panel, int64_t row, int64_t end) {
    alignas(64) int32_t sums[2][rows * kPanel];
    const int64_t tiles = (end - row + rows - 1) / rows;
    const int64_t lines = std::min<int64_t>((Sizes<P>::panel_bytes / 64 + tiles - 1) / tiles, 32);
    const int8_t* next = panel.next;
    int64_t before = -1;
    int which = 0;
    const auto pending = [&](int v) { finish<P, rows>(sums[which ^ 1], v, before, panel, a); };
    const auto flush = [&] {
      for (int v = 0; before >= 0 && v < rows * 4; ++v) pending(v);
      before = -1;
    };
    const auto nothing = [](int) {};
    for_rows<rows>(row, end, [&]<int R>(int64_t at) {
      for (int64_t line = 0; line < lines; ++line, next += 64) _mm_prefetch(next, _MM_HINT_T1);
      if constexpr (overlaps<P> && R == rows) {
        if (before < 0) {
          tile<R, P::K, 0>(a.x + at * P::K, panel.weights, sums[which], nothing);
        } else {
          tile<R, P::K, rows * 4>(a.x + at * P::K, panel.weights, sums[which], pending);
        }
        before = at;
        which ^= 1;
      } else {
        flush();
        tile<R, P::K, 0>(a.x + at * P::K, panel.weights, sums[which], nothing);
        for (int v = 0; v < R * 4; ++v) finish<P, R>(sums[which], v, at, panel, a);
      }
    });
    flush();
  }

  // The others call functions, around which every accumulator would have to be saved.
  template <class P>
  static constexpr bool overlaps =
      P::activation == Activation::none || P::activation == Activation::relu || P::activation == Activation::gelu;

  // sum[4][R][16] of R rows and 64 columns, with `pending(0 .. V - 1)` spread over the way.
  template <int R, int64_t K, int V, class Pending>
  static __attribute__((noinline)) void tile(const uint8_t* __restrict x, const int8_t* __restrict w, int32_t* out, const Pending& pending) {
    __m512i sum[R][4];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) sum[r][c] = _mm512_setzero_si512();
    constexpr int64_t groups = K / 4, chunk = V ? groups / V : 0;
    const auto load = [&](int r) __attribute__((always_inline)) { return load_group(x + r * K); };
    if constexpr (V > 0) {
      for (int v = 0; v < V; ++v) {
        for (int64_t g = 0; g < chunk; ++g, x += 4, w += 4 * kPanel) step<R>(sum, w, load);
        pending(v);
      }
    }
    for (int64_t g = V * chunk; g < groups; ++g, x += 4, w += 4 * kPanel) step<R>(sum, w, load);
    if constexpr (K % 4 != 0)
      step<R>(sum, w, [&](int r) { return load_short_group(x + r * K, K % 4); });
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) _mm512_store_si512(out + (c * R + r) * 16, sum[r][c]);
  }

  template <int R, class Load>
  static inline __attribute__((always_inline)) void step(__m512i (&sum)[R][4], const int8_t* w, Load load) {
    __m512i b[4];
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) b[c] = _mm512_loadu_si512(w + 64 * c);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m512i a = _mm512_set1_epi32(load(r));
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) dot(sum[r][c], a, b[c]);
    }
  }

  // ---- epilogue, 16 columns at a time ----

  template <class T>
  static inline __m512 load(const T* p, __mmask16 mask) {
    if constexpr (sizeof(T) == 4) {
      return _mm512_maskz_loadu_ps(mask, p);
    } else if constexpr (std::is_same_v<T, c10::Half>) {
      return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p));
    } else {
      return _mm512_castsi512_ps(
          _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)), 16));
    }
  }

  static inline __m512 gelu(__m512 x) {
    const __m512 magnitude = _mm512_abs_ps(x);
    // min(NaN, limit) is limit: the index stays in the table, and x * 0.5 carries the NaN on.
    const __m512 u = _mm512_mul_ps(_mm512_min_ps(magnitude, _mm512_set1_ps(kGeluLimit)),
                                   _mm512_set1_ps(kGeluSegmentsPerUnit));
    const __m512i segment = _mm512_cvttps_epi32(u);
    const __m512 f = _mm512_sub_ps(u, _mm512_cvtepi32_ps(segment));
    __m512 q = _mm512_permutexvar_ps(segment, _mm512_loadu_ps(kGelu[4]));
#pragma GCC unroll 4
    for (int power = 3; power >= 0; --power)
      q = _mm512_add_ps(_mm512_mul_ps(q, f), _mm512_permutexvar_ps(segment, _mm512_loadu_ps(kGelu[power])));
    return _mm512_add_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.5f)), _mm512_mul_ps(magnitude, q));
  }

  template <Activation A>
  static inline __m512 activate(__m512 x) {
    if constexpr (A == Activation::relu) {
      // max(x, 0) with x second, so that a NaN passes through
      return _mm512_max_ps(_mm512_setzero_ps(), x);
    } else if constexpr (A == Activation::gelu) {
      return gelu(x);
    } else if constexpr (A == Activation::none) {
      return x;
    } else {
      return by_library<A>(x);
    }
  }

  // Functions of the vector library. Inductor can be told to compile for shorter vectors, whose
  // Vectorized<float> is no __m512: then one element after the other.
  template <Activation A>
  static inline __m512 by_library(__m512 x) {
#ifdef CPU_CAPABILITY_AVX512
    using Floats = at::vec::Vectorized<float>;
    const Floats v(x), one(1.0f);
    if constexpr (A == Activation::gelu_tanh) {
      const Floats inner = Floats(0.7978845608028654f) * (v + Floats(0.044715f) * (v * v * v));
      return Floats(0.5f) * v * (one + inner.tanh());
    } else if constexpr (A == Activation::silu) {
      return v / (one + v.neg().exp());
    } else {
      return v.tanh();
    }
#else
    alignas(64) float each[16];
    _mm512_store_ps(each, x);
    for (float& value : each) value = qinductor::activate<A>(value);
    return _mm512_load_ps(each);
#endif
  }

  template <class P>
  static inline void store_vector(__m512 y, typename P::Out* out, __mmask16 mask, __m512 inverse_scale, __m512 out_zero_point) {
    if constexpr (P::requantizes) {
      __m512 code = _mm512_roundscale_ps(_mm512_mul_ps(y, inverse_scale), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      code = _mm512_add_ps(code, out_zero_point);
      // max(NaN, 0) is 0
      code = _mm512_min_ps(_mm512_max_ps(code, _mm512_setzero_ps()), _mm512_set1_ps(255.0f));
      _mm512_mask_cvtepi32_storeu_epi8(out, mask, _mm512_cvttps_epi32(code));
    } else if constexpr (sizeof(typename P::Out) == 4) {
      _mm512_mask_storeu_ps(out, mask, y);
    } else if constexpr (std::is_same_v<typename P::Out, c10::Half>) {
      _mm256_mask_storeu_epi16(out, mask, _mm512_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    } else {
      // To bfloat16, ties to even, in integers: vcvtneps2bf16 would flush subnormals, and the branch
      // that avoids it costs more than these additions, which run beside the products.
      const __m512i bits = _mm512_castps_si512(y);
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      __m512i half = _mm512_srli_epi32(
          _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
      const __mmask16 nan = _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q);
      half = _mm512_mask_mov_epi32(half, nan, _mm512_set1_epi32(0x7fc0));
      _mm512_mask_cvtepi32_storeu_epi16(out, mask, half);
    }
  }

  // Vector v of a tile's sums: row v % R, columns 16 * (v / R) and on.
  template <class P, int R>
  static inline __attribute__((always_inline)) void finish(const int32_t* sums, int v, int64_t row, const Panel<P>& panel, const Args<P>& a) {
    const int64_t c = v / R * 16, left = panel.count - c;
    const __mmask16 mask = Sizes<P>::whole || left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
    row += v % R;
    const __m512i sum = _mm512_sub_epi32(_mm512_load_si512(sums + v * 16), _mm512_load_si512(panel.compensation + c));
    __m512 y = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(a.x_scale[P::per_token ? row : 0]));
    y = _mm512_mul_ps(y, _mm512_load_ps(panel.w_scale + c));
    if constexpr (P::has_bias) y = _mm512_add_ps(y, _mm512_load_ps(panel.bias + c));
    y = activate<P::activation>(y);
    const int64_t at = row * P::N + panel.column + c;
    if constexpr (P::has_residual) y = _mm512_add_ps(y, load(a.residual + at, mask));
    __m512 inverse_scale = _mm512_setzero_ps();
    if constexpr (P::requantizes) inverse_scale = _mm512_load_ps(panel.inverse_scale + c);
    store_vector<P>(y, a.out + at, mask, inverse_scale, _mm512_set1_ps(panel.out_zero_point));
  }
};

}  // namespace qinductor
#endif
