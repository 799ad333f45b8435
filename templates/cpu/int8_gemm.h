// The loop nest of an int8 linear layer: u8 activations times packed s8 weights, and its epilogue.
//
// Included as text into generated kernels; an ISA file (int8_gemm_<isa>.h) that defines `Isa` comes
// before the kernel. `Isa` supplies
//   rows                              rows of its register tile
//   block<P>(a, panel, row, end)      rows [row, end) of one panel, through the epilogue
// and P, the problem, is a struct of compile-time facts written by the template. One problem may have
// several weights of equal shape that multiply the same rows (queries, keys and values): their
// outputs stand side by side.
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
  const int8_t* packed[P::weights];
  const float* w_scale[P::weights];
  const int32_t* w_sum[P::weights];
  const typename P::Bias* bias[P::weights];
  const typename P::Residual* residual;
  const float* out_inverse_scale;
  const int32_t* out_zero_point;
  typename P::Out* out;
};

// Sizes of a problem: P::width columns a weight, P::N of all of them, in whole panels each.
template <class P>
struct Sizes {
  static constexpr int64_t per_weight = (P::width + kPanel - 1) / kPanel;
  static constexpr int64_t panels = per_weight * P::weights;
  static constexpr int64_t panel_bytes = (P::K + 3) / 4 * 4 * kPanel;
  static constexpr bool whole = P::width % kPanel == 0;
};

// What the epilogue of one panel reads, zero behind the last column: only its store needs a mask.
template <class P>
struct Panel {
  const int8_t* weights;
  const int8_t* next;  // the panel that the caller takes after this one, to be fetched meanwhile
  int64_t column;      // of the output
  int64_t count;       // columns that exist
  float out_zero_point;
  alignas(64) int32_t compensation[kPanel];  // x_zero_point * w_sum
  alignas(64) float w_scale[kPanel];
  alignas(64) float bias[kPanel];
  alignas(64) float inverse_scale[kPanel];

  Panel(const Args<P>& a, int64_t index) {
    using S = Sizes<P>;
    const int64_t w = index / S::per_weight, first = index % S::per_weight * kPanel;
    const auto packed = [&](int64_t i) {
      return a.packed[i / S::per_weight] + i % S::per_weight * S::panel_bytes;
    };
    weights = packed(index);
    next = packed((index + 1) % S::panels);
    column = w * P::width + first;
    count = S::whole ? kPanel : std::min<int64_t>(kPanel, P::width - first);
    out_zero_point = 0.0f;
    if constexpr (P::requantizes) out_zero_point = static_cast<float>(*a.out_zero_point);
    const uint32_t zero_point = static_cast<uint32_t>(*a.x_zero_point);
    for (int64_t c = 0; c < kPanel; ++c) {
      const bool exists = c < count;
      const int64_t n = first + c;
      // Unsigned arithmetic wraps; the sum itself fits (K is at most ops.MAX_K).
      compensation[c] = exists ? static_cast<int32_t>(zero_point * static_cast<uint32_t>(a.w_sum[w][n])) : 0;
      w_scale[c] = exists ? a.w_scale[w][n] : 0.0f;
      if constexpr (P::has_bias) bias[c] = exists ? static_cast<float>(a.bias[w][n]) : 0.0f;
      if constexpr (P::requantizes) inverse_scale[c] = exists ? a.out_inverse_scale[P::out_per_channel ? n : 0] : 0.0f;
    }
  }
};

// Four activation bytes as one 32-bit lane; the last group of a row may be short.
inline uint32_t load_group(const uint8_t* x) {
  uint32_t lane;
  std::memcpy(&lane, x, 4);
  return lane;
}
inline uint32_t load_short_group(const uint8_t* x, int64_t count) {
  uint32_t lane = 0;
  std::memcpy(&lane, x, count);
  return lane;
}

// Calls f.operator()<R>(row) for tiles of R rows: whole ones of `Rows`, then one of what is left.
template <int Rows, class F>
inline void for_rows(int64_t row, int64_t end, const F& f) {
  for (; row + Rows <= end; row += Rows) f.template operator()<Rows>(row);
  if constexpr (Rows > 1) {
    if (row < end) for_rows<Rows - 1>(row, end, f);
  }
}

// Row blocks of equal sizes: whole register tiles, at most `row_limit` rows, or a short last block
// would count as much as a full one when the tasks are dealt.
template <class Isa>
inline int64_t rows_of_block(int64_t M, int64_t row_limit) {
  const int64_t least = (M + row_limit - 1) / row_limit;
  return ((M + least - 1) / least + Isa::rows - 1) / Isa::rows * Isa::rows;
}

// Tasks are (row block, panel) pairs, row blocks outermost, dealt to the threads in equal runs: with
// many rows each thread keeps its rows and streams the weights; with few rows each streams a part.
template <class Isa, class P>
inline void gemm(const Args<P>& a, int64_t M, int64_t row_limit) {
  if (M == 0) return;
  constexpr int64_t panels = Sizes<P>::panels;
  const int64_t row_block = rows_of_block<Isa>(M, row_limit);
  const int64_t blocks = (M + row_block - 1) / row_block;
  const int64_t tasks = blocks * panels;
  const int64_t threads = std::min<int64_t>(omp_get_max_threads(), tasks);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t t = omp_get_thread_num(), count = omp_get_num_threads();
    for (int64_t task = tasks * t / count; task < tasks * (t + 1) / count; ++task) {
      const int64_t row = task / panels * row_block;
      Isa::template block<P>(a, Panel<P>(a, task % panels), row, std::min(M, row + row_block));
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
  if constexpr (A == Activation::relu) return x < 0.0f ? 0.0f : x;
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

// Column c of a panel, everything of the epilogue up to the choice of the output's type.
template <class P>
inline float dequantized(int32_t acc, int64_t row, int64_t c, const Panel<P>& panel, const Args<P>& a) {
  const int32_t sum = static_cast<int32_t>(
      static_cast<uint32_t>(acc) - static_cast<uint32_t>(panel.compensation[c]));
  float y = static_cast<float>(sum) * a.x_scale[P::per_token ? row : 0];
  y = y * panel.w_scale[c];
  if constexpr (P::has_bias) y = y + panel.bias[c];
  y = activate<P::activation>(y);
  if constexpr (P::has_residual) y = y + static_cast<float>(a.residual[row * P::N + panel.column + c]);
  return y;
}

inline uint8_t code_of(float y, float inverse_scale, float zero_point) {
  const float code = std::nearbyint(y * inverse_scale) + zero_point;
  return static_cast<uint8_t>(code > 0.0f ? std::min(code, 255.0f) : 0.0f);
}

// acc[R][64] through the epilogue, element by element.
template <class P, int R>
inline void finish_scalar(const int32_t* acc, int64_t row, const Panel<P>& panel, const Args<P>& a) {
  for (int r = 0; r < R; ++r)
    for (int64_t c = 0; c < panel.count; ++c) {
      const float y = dequantized<P>(acc[r * kPanel + c], row + r, c, panel, a);
      auto& out = a.out[(row + r) * P::N + panel.column + c];
      if constexpr (P::requantizes) {
        out = code_of(y, panel.inverse_scale[c], panel.out_zero_point);
      } else {
        out = narrow<typename P::Out>(y);
      }
    }
}

// Isa::block for an `Isa` that supplies tile<R, K>(x, weights, acc): acc[R][64], exact int32.
template <class Isa, class P>
inline void block_by_tiles(const Args<P>& a, const Panel<P>& panel, int64_t row, int64_t end) {
  for_rows<Isa::rows>(row, end, [&]<int R>(int64_t at) {
    alignas(64) int32_t acc[R * kPanel];
    Isa::template tile<R, P::K>(a.x + at * P::K, panel.weights, acc);
    finish_scalar<P, R>(acc, at, panel, a);
  });
}

}  // namespace qinductor
#endif
