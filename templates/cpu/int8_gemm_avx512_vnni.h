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

  template <int R, int64_t K>
  static void tile(const uint8_t* __restrict x, const int8_t* __restrict panel, int32_t* acc) {
    __m512i sum[R][4];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) sum[r][c] = _mm512_setzero_si512();
    constexpr int64_t whole = K / 4;
    for (int64_t g = 0; g < whole; ++g) {
      step<R, K>(sum, panel + g * 4 * kPanel, [&](int r) { return load_group<K>(x + r * K, g * 4); });
    }
    if constexpr (K % 4 != 0) {
      step<R, K>(sum, panel + whole * 4 * kPanel,
                 [&](int r) { return load_short_group(x + r * K, whole * 4, K % 4); });
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) _mm512_store_si512(acc + r * kPanel + 16 * c, sum[r][c]);
  }

  template <int R, int64_t K, class Load>
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
    using at::vec::Vectorized;
    if constexpr (A == Activation::relu) {
      // max(x, 0) with x second, so that a NaN passes through
      return _mm512_max_ps(_mm512_setzero_ps(), x);
    } else if constexpr (A == Activation::gelu) {
      return gelu(x);
    } else if constexpr (A == Activation::gelu_tanh) {
      const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
      const __m512 inner = _mm512_mul_ps(
          _mm512_set1_ps(0.7978845608028654f),
          _mm512_add_ps(x, _mm512_mul_ps(_mm512_set1_ps(0.044715f), cube)));
      const __m512 tanh = Vectorized<float>(inner).tanh();
      return _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(0.5f), x),
                           _mm512_add_ps(_mm512_set1_ps(1.0f), tanh));
    } else if constexpr (A == Activation::silu) {
      const __m512 e = Vectorized<float>(x).neg().exp();
      return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
    } else if constexpr (A == Activation::tanh) {
      return Vectorized<float>(x).tanh();
    } else {
      return x;
    }
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
#ifdef __AVX512BF16__
      // One instruction, where no lane is a subnormal, which it would flush, or a NaN, whose payload
      // it would keep.
      if (__builtin_expect(_mm512_fpclass_ps_mask(y, 0x20 | 0x01 | 0x80) == 0, 1)) {
        _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(y));
        return;
      }
#endif
      // To bfloat16, ties to even, in integers.
      const __m512i bits = _mm512_castps_si512(y);
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      __m512i half = _mm512_srli_epi32(
          _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
      const __mmask16 nan = _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q);
      half = _mm512_mask_mov_epi32(half, nan, _mm512_set1_epi32(0x7fc0));
      _mm512_mask_cvtepi32_storeu_epi16(out, mask, half);
    }
  }

  // Columns outermost: what belongs to a column is loaded once for all rows of the tile.
  template <class P, int R>
  static inline void finish(const int32_t* acc, int64_t row, int64_t column, const Args<P>& a) {
    const int64_t count = columns_of<P>(column);
    const __m512i zero_point = _mm512_set1_epi32(*a.x_zero_point);
    __m512 inverse_scale = _mm512_set1_ps(1.0f), out_zero_point = _mm512_setzero_ps();
    if constexpr (P::requantizes) {
      inverse_scale = _mm512_set1_ps(*a.out_inverse_scale);
      out_zero_point = _mm512_set1_ps(static_cast<float>(*a.out_zero_point));
    }
    for (int c = 0; c < 4; ++c) {
      const int64_t n = column + 16 * c, left = count - 16 * c;
      const __mmask16 mask = left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
      if (P::N % kPanel != 0 && mask == 0) break;
      const __m512i comp = _mm512_mullo_epi32(zero_point, _mm512_maskz_loadu_epi32(mask, a.w_sum + n));
      const __m512 w_scale = _mm512_maskz_loadu_ps(mask, a.w_scale + n);
      __m512 bias = _mm512_setzero_ps();
      if constexpr (P::has_bias) bias = load(a.bias + n, mask);
      if constexpr (P::requantizes && P::out_per_channel) inverse_scale = _mm512_maskz_loadu_ps(mask, a.out_inverse_scale + n);
      for (int r = 0; r < R; ++r) {
        const __m512 x_scale = _mm512_set1_ps(a.x_scale[P::per_token ? row + r : 0]);
        __m512 y = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_load_si512(acc + r * kPanel + 16 * c), comp));
        y = _mm512_mul_ps(_mm512_mul_ps(y, x_scale), w_scale);
        if constexpr (P::has_bias) y = _mm512_add_ps(y, bias);
        y = activate<P::activation>(y);
        const int64_t at = (row + r) * P::N + n;
        if constexpr (P::has_residual) y = _mm512_add_ps(y, load(a.residual + at, mask));
        store_vector<P>(y, a.out + at, mask, inverse_scale, out_zero_point);
      }
    }
  }
};

}  // namespace qinductor
#endif
