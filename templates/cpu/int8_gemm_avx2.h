// int8 GEMM for AVX2 without VNNI, exact: both operands are widened to 16 bits and multiplied with
// vpmaddwd, whose pair sums of at most 2 * 255 * 128 fit 32 bits. (vpmaddubsw would saturate its
// 16-bit pair sums, so it is never used.)
#ifndef QINDUCTOR_INT8_GEMM_AVX2_H
#define QINDUCTOR_INT8_GEMM_AVX2_H
#include <immintrin.h>

namespace qinductor {

struct Avx2 {
  static constexpr int rows = 4;
  static constexpr int64_t slice = 512;  // k at a time: 4 rows of 16-bit activations take 4 KB

  // acc holds two partial sums a column, added at the end. Eight columns at a time: 2 * R ymm.
  template <int R, int64_t K>
  static void tile(const uint8_t* x, const int8_t* panel, int32_t* acc) {
    alignas(32) int16_t wide[R][slice];
    for (int i = 0; i < R * kPanel; ++i) acc[i] = 0;
    for (int64_t begin = 0; begin < K; begin += slice) {
      const int64_t count = std::min(slice, K - begin), groups = (count + 3) / 4;
      for (int r = 0; r < R; ++r) {
        for (int64_t k = 0; k < count; ++k) wide[r][k] = x[r * K + begin + k];
        for (int64_t k = count; k < groups * 4; ++k) wide[r][k] = 0;
      }
      for (int64_t c = 0; c < kPanel; c += 8)
        eight_columns<R>(wide, panel + begin * kPanel + c * 4, groups, acc + c);
    }
  }

  template <int R>
  static void eight_columns(const int16_t (*wide)[slice], const int8_t* panel, int64_t groups, int32_t* acc) {
    __m256i low[R], high[R];
    for (int r = 0; r < R; ++r) low[r] = high[r] = _mm256_setzero_si256();
    for (int64_t g = 0; g < groups; ++g) {
      const int8_t* w = panel + g * 4 * kPanel;
      const __m256i w0 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)w));
      const __m256i w1 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(w + 16)));
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        int64_t four;
        std::memcpy(&four, &wide[r][g * 4], 8);
        const __m256i a = _mm256_set1_epi64x(four);
        low[r] = _mm256_add_epi32(low[r], _mm256_madd_epi16(a, w0));
        high[r] = _mm256_add_epi32(high[r], _mm256_madd_epi16(a, w1));
      }
    }
    for (int r = 0; r < R; ++r) {
      // hadd leaves columns 0 1 4 5 | 2 3 6 7
      __m256i sum = _mm256_permute4x64_epi64(_mm256_hadd_epi32(low[r], high[r]), 0xD8);
      __m256i* out = (__m256i*)(acc + r * kPanel);
      _mm256_storeu_si256(out, _mm256_add_epi32(_mm256_loadu_si256(out), sum));
    }
  }

  template <class P>
  static void block(const Args<P>& a, const Panel<P>& panel, int64_t row, int64_t end) {
    block_by_tiles<Avx2, P>(a, panel, row, end);
  }
};

}  // namespace qinductor
#endif
