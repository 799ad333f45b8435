// int8 GEMM in plain C++: the reference for every other instruction set.
#ifndef QINDUCTOR_INT8_GEMM_PORTABLE_H
#define QINDUCTOR_INT8_GEMM_PORTABLE_H

namespace qinductor {

struct Portable {
  static constexpr int rows = 4;

  template <int R, int64_t K>
  static void tile(const uint8_t* x, const int8_t* panel, int32_t* acc) {
    for (int i = 0; i < R * kPanel; ++i) acc[i] = 0;
    for (int64_t k = 0; k < K; ++k) {
      const int8_t* group = panel + k / 4 * 4 * kPanel + k % 4;
      for (int r = 0; r < R; ++r) {
        const int32_t value = x[r * K + k];
        for (int64_t c = 0; c < kPanel; ++c) acc[r * kPanel + c] += value * group[4 * c];
      }
    }
  }

  template <class P>
  static void block(const Args<P>& a, const Panel<P>& panel, int64_t row, int64_t end) {
    block_by_tiles<Portable, P>(a, panel, row, end);
  }
};

}  // namespace qinductor
#endif
