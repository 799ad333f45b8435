// The loop nest of an int8 linear layer: u8 activations times packed s8 weights, and its epilogue.
//
// Included as text into generated kernels; an ISA file (int8_gemm_<isa>.h) that defines `Isa` comes
// before the kernel. `Isa` supplies
//   rows                                   rows of its register tile
//   tile<R>(x, ld, panel, K, acc)          acc[R][64] = sum over k, exact int32
//   finish<P, R>(acc, row, column, args)   the epilogue of R rows of 64 columns
// and P, the problem, is a struct of compile-time facts written by the template.
#ifndef QINDUCTOR_INT8_GEMM_H
#define QINDUCTOR_INT8_GEMM_H
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>

namespace qinductor {

constexpr int64_t kPanel = 64;
enum class Activation { none, relu, gelu, gelu_tanh, silu, tanh };

template <class P>
struct Args {
  const uint8_t* x;
  const float* x_scale;
  const int32_t* x_zero_point;
  const int8_t* packed;
  const float* w_scale;
  const int32_t* w_sum;
  const typename P::Bias* bias;
  const typename P::Residual* residual;
  const float* out_inverse_scale;
  const int32_t* out_zero_point;
  typename P::Out* out;
};

// Columns of a panel that exist: 64 but in the last one.
template <class P>
inline int64_t columns_of(int64_t column) {
  return std::min<int64_t>(kPanel, P::N - column);
}

// Four activation bytes as one 32-bit lane; the last group of a row may be short.
template <int64_t K>
inline uint32_t load_group(const uint8_t* x, int64_t k) {
  uint32_t lane = 0;
  std::memcpy(&lane, x + k, 4);
  return lane;
}
inline uint32_t load_short_group(const uint8_t* x, int64_t k, int64_t count) {
  uint32_t lane = 0;
  std::memcpy(&lane, x + k, count);
  return lane;
}

template <class Isa, class P, int R>
inline void rows_of_tile(const Args<P>& a, int64_t row, int64_t column, const int8_t* panel) {
  alignas(64) int32_t acc[R * kPanel];
  Isa::template tile<R, P::K>(a.x + row * P::K, panel, acc);
  Isa::template finish<P, R>(acc, row, column, a);
}

template <class Isa, class P, int R>
inline void last_rows(const Args<P>& a, int64_t rows, int64_t row, int64_t column, const int8_t* panel) {
  if constexpr (R > 0) {
    if (rows == R) return rows_of_tile<Isa, P, R>(a, row, column, panel);
    last_rows<Isa, P, R - 1>(a, rows, row, column, panel);
  }
}

// Tasks are (row block, panel) pairs, row blocks outermost, dealt to the threads in equal runs: with
// many rows each thread keeps its rows and streams the weights; with few rows each streams a part.
// Row blocks have equal sizes (whole register tiles, at most `row_limit` rows), or a short last
// block would count as much as a full one when the tasks are dealt.
template <class Isa, class P>
inline void gemm(const Args<P>& a, int64_t M, int64_t row_limit) {
  if (M == 0) return;
  constexpr int64_t panels = (P::N + kPanel - 1) / kPanel;
  constexpr int64_t panel_bytes = (P::K + 3) / 4 * 4 * kPanel;
  const int64_t least = (M + row_limit - 1) / row_limit;
  const int64_t tiles = ((M + least - 1) / least + Isa::rows - 1) / Isa::rows;
  const int64_t row_block = tiles * Isa::rows;
  const int64_t blocks = (M + row_block - 1) / row_block;
  const int64_t tasks = blocks * panels;
  const int64_t threads = std::min<int64_t>(omp_get_max_threads(), tasks);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t t = omp_get_thread_num(), count = omp_get_num_threads();
    for (int64_t task = tasks * t / count; task < tasks * (t + 1) / count; ++task) {
      const int64_t block = task / panels, column = task % panels * kPanel;
      const int8_t* panel = a.packed + task % panels * panel_bytes;
      const int64_t end = std::min(M, (block + 1) * row_block);
      int64_t row = block * row_block;
      for (; row + Isa::rows <= end; row += Isa::rows)
        rows_of_tile<Isa, P, Isa::rows>(a, row, column, panel);
      last_rows<Isa, P, Isa::rows - 1>(a, end - row, row, column, panel);
    }
  }
}

// ---- the epilogue of one element, in the order that qinductor/ops.py fixes ----

inline float rounded_gelu(float x) {
  const float magnitude = std::fabs(x);
  const float u = std::min(magnitude, kGeluLimit) * kGeluSegmentsPerUnit;
  const int segment = u == u ? static_cast<int>(u) : 0;
  const float f = u - static_cast<float>(segment);
  float q = kGelu[4][segment];
  for (int power = 3; power >= 0; --power) {
    q = q * f;
    q = q + kGelu[power][segment];
  }
  const float half = x * 0.5f, tail = magnitude * q;
  return half + tail;
}

template <Activation A>
inline float activate(float x) {
  if constexpr (A == Activation::relu) return x > 0.0f || x != x ? x : 0.0f;
  if constexpr (A == Activation::gelu) return rounded_gelu(x);
  if constexpr (A == Activation::gelu_tanh) {
    const float cube = x * x * x;
    return 0.5f * x * (1.0f + std::tanh(0.7978845608028654f * (x + 0.044715f * cube)));
  }
  if constexpr (A == Activation::silu) return x / (1.0f + std::exp(-x));
  if constexpr (A == Activation::tanh) return std::tanh(x);
  return x;
}

template <class Out>
inline Out narrow(float y) {
  return static_cast<Out>(y);
}

// Everything of the epilogue up to the choice of the output's type.
template <class P>
inline float dequantized(int32_t acc, int64_t row, int64_t n, const Args<P>& a) {
  // Unsigned arithmetic wraps; the sum itself fits (K is at most ops.MAX_K).
  const int32_t sum = static_cast<int32_t>(
      static_cast<uint32_t>(acc) -
      static_cast<uint32_t>(*a.x_zero_point) * static_cast<uint32_t>(a.w_sum[n]));
  float y = static_cast<float>(sum) * a.x_scale[P::per_token ? row : 0];
  y = y * a.w_scale[n];
  if constexpr (P::has_bias) y = y + static_cast<float>(a.bias[n]);
  y = activate<P::activation>(y);
  if constexpr (P::has_residual) y = y + static_cast<float>(a.residual[row * P::N + n]);
  return y;
}

template <class P>
inline void store(float y, int64_t row, int64_t n, const Args<P>& a) {
  if constexpr (P::requantizes) {
    const float scaled = y * a.out_inverse_scale[P::out_per_channel ? n : 0];
    float code = std::nearbyint(scaled) + static_cast<float>(*a.out_zero_point);
    code = code > 0.0f ? std::min(code, 255.0f) : 0.0f;
    a.out[row * P::N + n] = static_cast<uint8_t>(code);
  } else {
    a.out[row * P::N + n] = narrow<typename P::Out>(y);
  }
}

template <class P, int R>
inline void finish_scalar(const int32_t* acc, int64_t row, int64_t column, const Args<P>& a) {
  const int64_t count = columns_of<P>(column);
  for (int r = 0; r < R; ++r)
    for (int64_t c = 0; c < count; ++c)
      store<P>(dequantized<P>(acc[r * kPanel + c], row + r, column + c, a), row + r, column + c, a);
}

}  // namespace qinductor
#endif
