// Scaled dot-product attention with bf16 dot products (AVX-512 BF16), float32 sums and softmax.
//
// q, k, v: (B, S, H * D) bf16, heads side by side as the projections leave them, perhaps as columns
// of one wider tensor; nothing is transposed in memory. Needs int8_gemm_avx512_vnni.h (its stores),
// int8_gemm.h (for_rows) and scratch.h before it. One task is one head of one sequence: its keys and values are packed into
// pairs (which vdpbf16ps multiplies), then six queries at a time go through scores, softmax and the
// weighted sum while everything stays in the L1 and L2 caches.
#ifndef QINDUCTOR_ATTENTION_AVX512_BF16_H
#define QINDUCTOR_ATTENTION_AVX512_BF16_H
#include <immintrin.h>
#include <limits>

namespace qinductor {

struct AttentionSizes {
  int64_t batch, queries, keys;
  int64_t q_row, k_row, v_row;  // elements from one row to the next
  int64_t mask_batch, mask_head, mask_query;  // strides of the additive mask, in elements
};

template <class P>
struct AttentionArgs {
  const c10::BFloat16* q;
  const c10::BFloat16* k;
  const c10::BFloat16* v;
  const float* mask;
  const float* out_inverse_scale;
  const int32_t* out_zero_point;
  typename P::Out* out;
};

struct Avx512Bf16Attention {
  static constexpr int rows = 6;
  static constexpr float lowest = -std::numeric_limits<float>::infinity();

  static inline void dot(__m512& acc, __m512i a, __m512i b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  }

  static inline int32_t pair(const c10::BFloat16* p) {
    int32_t lanes;
    std::memcpy(&lanes, p, sizeof lanes);
    return lanes;
  }

  // out[R][16 * C] = sum over `pairs` of a[r] * b; b advances by `step` lanes of two bf16 a pair.
  // Not inlined: among the caller's live registers the accumulators would be spilled in the loop.
  template <int R, int C>
  static __attribute__((noinline)) void tile(const c10::BFloat16* a, int64_t lda, const uint32_t* b, int64_t step, int64_t pairs, float* out, int64_t ldo) {
    __m512 acc[R][C];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) acc[r][c] = _mm512_setzero_ps();
    for (int64_t p = 0; p < pairs; ++p) {
      __m512i w[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) w[c] = _mm512_loadu_si512(b + p * step + 16 * c);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m512i value = _mm512_set1_epi32(pair(a + r * lda + 2 * p));
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) dot(acc[r][c], value, w[c]);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) _mm512_storeu_ps(out + r * ldo + 16 * c, acc[r][c]);
  }

  static inline void transpose16(__m512i (&x)[16]) {
    __m512i y[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
      y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      x[4 * i] = _mm512_unpacklo_epi64(y[4 * i], y[4 * i + 2]);
      x[4 * i + 1] = _mm512_unpackhi_epi64(y[4 * i], y[4 * i + 2]);
      x[4 * i + 2] = _mm512_unpacklo_epi64(y[4 * i + 1], y[4 * i + 3]);
      x[4 * i + 3] = _mm512_unpackhi_epi64(y[4 * i + 1], y[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
      y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
      y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
      y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
      x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    }
  }

  // Keys into panels of 64: out[panel][d / 2][64] lanes of (d, d + 1); keys past the end are zero.
  template <class P>
  static void pack_keys(const c10::BFloat16* k, int64_t ld, int64_t keys, uint32_t* out) {
    constexpr int64_t pairs = P::D / 2;
    for (int64_t j = 0; j < (keys + 63) / 64 * 64; j += 16) {
      uint32_t* panel = out + j / 64 * pairs * 64 + j % 64;
      for (int64_t p = 0; p < pairs; p += 16) {
        const int64_t width = std::min<int64_t>(16, pairs - p);
        const __mmask16 mask = width == 16 ? 0xffff : (1u << width) - 1;
        __m512i x[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i)
          x[i] = j + i < keys ? _mm512_maskz_loadu_epi32(mask, k + (j + i) * ld + 2 * p) : _mm512_setzero_si512();
        transpose16(x);
        for (int64_t i = 0; i < width; ++i) _mm512_storeu_si512(panel + (p + i) * 64, x[i]);
      }
    }
  }

  // Values into pairs of keys: out[key / 2][padded D] lanes of (v[key][d], v[key + 1][d]).
  template <class P>
  static void pack_values(const c10::BFloat16* v, int64_t ld, int64_t keys, uint32_t* out) {
    constexpr int64_t padded = (P::D + 15) / 16 * 16;
    for (int64_t j = 0; j < (keys + 63) / 64 * 64; j += 2) {
      for (int64_t d = 0; d < P::D; d += 16) {
        const int64_t width = std::min<int64_t>(16, P::D - d);
        const __mmask16 mask = width == 16 ? 0xffff : (1u << width) - 1;
        const auto row = [&](int64_t s) {
          return s < keys ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, v + s * ld + d)) : _mm512_setzero_si512();
        };
        const __m512i lanes = _mm512_or_si512(row(j), _mm512_slli_epi32(row(j + 1), 16));
        _mm512_storeu_si512(out + j / 2 * padded + d, lanes);
      }
    }
  }

  // 2**x for x <= 0 and NaN, relative error below 3e-6: far below a bf16 step of 2**-8. 2**0 is 1.
  static inline __m512 exp2(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-150.0f), x);  // of a NaN and a number the second, the NaN
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(kExp2[4]);
#pragma GCC unroll 4
    for (int power = 3; power >= 0; --power) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(kExp2[power]));
    return _mm512_scalef_ps(p, n);
  }

  // A row of scores times scale plus mask; keys from `limit` on do not exist. Returns the largest of
  // each lane.
  template <class P>
  static inline __m512 scale_row(float* scores, const float* mask, int64_t limit, int64_t padded) {
    const __m512 scale = _mm512_set1_ps(P::scale);
    __m512 top = _mm512_set1_ps(lowest);
    const auto scaled = [&](int64_t j, __mmask16 live) __attribute__((always_inline)) {
      __m512 x = _mm512_loadu_ps(scores + j);
      if constexpr (P::has_mask) {
        x = _mm512_fmadd_ps(x, scale, _mm512_maskz_loadu_ps(live, mask + j));
      } else {
        x = _mm512_mul_ps(x, scale);
      }
      if (live != 0xffff) x = _mm512_mask_mov_ps(_mm512_set1_ps(lowest), live, x);
      _mm512_storeu_ps(scores + j, x);
      top = _mm512_max_ps(x, top);  // a NaN score is left out of the maximum, not of the sum
    };
    const int64_t whole = limit / 16 * 16;
    for (int64_t j = 0; j < whole; j += 16) scaled(j, 0xffff);
    for (int64_t j = whole; j < padded; j += 16) scaled(j, limit > j ? (1u << (limit - j)) - 1 : 0);
    return top;
  }

  // Scaled scores → bf16 probabilities, not yet divided by their sum, which is returned by lanes. The
  // maximum is subtracted before the change to powers of two: a mask may be the least finite number.
  static inline __m512 exponentials(const float* scores, float highest, int64_t padded, c10::BFloat16* out) {
    const __m512 shift = _mm512_set1_ps(highest == lowest ? 0.0f : highest);
    const __m512 log2e = _mm512_set1_ps(1.44269504f);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < padded; j += 32) {
      const __m512 e0 = exp2(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + j), shift), log2e));
      const __m512 e1 = exp2(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + j + 16), shift), log2e));
      sum = _mm512_add_ps(sum, _mm512_add_ps(e0, e1));
      _mm512_storeu_si512(out + j, (__m512i)_mm512_cvtne2ps_pbh(e1, e0));
    }
    return sum;
  }

  template <class P, int R>
  static void block(const AttentionArgs<P>& a, const AttentionSizes& s, int64_t b, int64_t h, int64_t query,
                    const uint32_t* keys, const uint32_t* values, float* scores, c10::BFloat16* weights) {
    constexpr int64_t pairs = P::D / 2, vectors = (P::D + 15) / 16;
    const int64_t padded = (s.keys + 63) / 64 * 64;
    const int64_t last = P::causal ? std::min(s.keys, query + R) : s.keys;
    const c10::BFloat16* q = a.q + (b * s.queries + query) * s.q_row + h * P::D;
    for (int64_t j = 0; j < last; j += 64)
      tile<R, 4>(q, s.q_row, keys + j * pairs, 64, pairs, scores + j, padded);
    const int64_t used = (last + 63) / 64 * 64;
    // Step by step for all rows: the reductions of one row wait for nothing of another.
    float highest[R], inverse[R];
    __m512 lanes[R];
    for (int r = 0; r < R; ++r) {
      const float* mask = nullptr;
      if constexpr (P::has_mask)
        mask = a.mask + b * s.mask_batch + h * s.mask_head + (query + r) * s.mask_query;
      const int64_t limit = P::causal ? std::min(s.keys, query + r + 1) : s.keys;
      lanes[r] = scale_row<P>(scores + r * padded, mask, limit, used);
    }
    for (int r = 0; r < R; ++r) highest[r] = _mm512_reduce_max_ps(lanes[r]);
    for (int r = 0; r < R; ++r) lanes[r] = exponentials(scores + r * padded, highest[r], used, weights + r * padded);
    // A row whose keys are all masked gives zeros.
    for (int r = 0; r < R; ++r) inverse[r] = highest[r] == lowest ? 0.0f : 1.0f / _mm512_reduce_add_ps(lanes[r]);
    alignas(64) float sums[R][vectors * 16];
    const auto columns = [&]<int C>(int64_t v) {
      tile<R, C>(weights, padded, values + 16 * v, vectors * 16, used / 2, &sums[0][16 * v], vectors * 16);
    };
    for (int64_t v = 0; v + 4 <= vectors; v += 4) columns.template operator()<4>(v);
    if constexpr (vectors % 4 != 0) columns.template operator()<vectors % 4>(vectors / 4 * 4);
    for (int r = 0; r < R; ++r) finish<P>(sums[r], inverse[r], b * s.queries + query + r, h, a);
  }

  template <class P>
  static inline void finish(const float* sums, float inverse, int64_t row, int64_t h, const AttentionArgs<P>& a) {
    __m512 inverse_scale = _mm512_set1_ps(1.0f), out_zero_point = _mm512_setzero_ps();
    if constexpr (P::requantizes) {
      inverse_scale = _mm512_set1_ps(*a.out_inverse_scale);
      out_zero_point = _mm512_set1_ps(static_cast<float>(*a.out_zero_point));
    }
    for (int64_t d = 0; d < P::D; d += 16) {
      const __mmask16 mask = P::D - d >= 16 ? 0xffff : (1u << (P::D - d)) - 1;
      const int64_t n = h * P::D + d;
      const __m512 y = _mm512_mul_ps(_mm512_loadu_ps(sums + d), _mm512_set1_ps(inverse));
      if constexpr (P::requantizes && P::out_per_channel)
        inverse_scale = _mm512_maskz_loadu_ps(mask, a.out_inverse_scale + n);
      Avx512Vnni::store_vector<P>(y, a.out + row * P::H * P::D + n, mask, inverse_scale, out_zero_point);
    }
  }

  template <class P>
  static void run(const AttentionArgs<P>& a, const AttentionSizes& s) {
    if (s.batch == 0 || s.queries == 0) return;
    constexpr int64_t vectors = (P::D + 15) / 16;
    const int64_t padded = std::max<int64_t>((s.keys + 63) / 64 * 64, 64), heads = s.batch * P::H;
    const int64_t most = omp_get_max_threads();
    // Fewer heads than threads: the queries of a head are dealt out as well.
    const int64_t parts = heads >= most ? 1 : std::min((most + heads - 1) / heads, (s.queries + rows - 1) / rows);
    const int64_t tasks = heads * parts, threads = std::min(most, tasks);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      auto keys = scratch<uint32_t>(padded * (P::D / 2));
      auto values = scratch<uint32_t>(padded / 2 * vectors * 16);
      auto scores = scratch<float>(rows * padded);
      auto weights = scratch<c10::BFloat16>(rows * padded);
      const int64_t t = omp_get_thread_num(), count = omp_get_num_threads();
      for (int64_t task = tasks * t / count; task < tasks * (t + 1) / count; ++task) {
        const int64_t b = task / parts / P::H, h = task / parts % P::H, part = task % parts;
        pack_keys<P>(a.k + b * s.keys * s.k_row + h * P::D, s.k_row, s.keys, keys.get());
        pack_values<P>(a.v + b * s.keys * s.v_row + h * P::D, s.v_row, s.keys, values.get());
        const int64_t query = s.queries * part / parts;
        const int64_t end = s.queries * (part + 1) / parts;
        for_rows<rows>(query, end, [&]<int R>(int64_t at) {
          block<P, R>(a, s, b, h, at, keys.get(), values.get(), scores.get(), weights.get());
        });
      }
    }
  }
};

}  // namespace qinductor
#endif
