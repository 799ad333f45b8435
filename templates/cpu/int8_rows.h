// An int8 linear layer with an epilogue over whole rows: layer normalization, quantization of the
// result with a fixed scale or with one of its own a row.
//
// Such an epilogue needs a row's last column before it can write the first. A thread therefore takes
// so few rows at a time that their float32 outputs stay in its L2 cache, and what reaches memory is
// what the next layer reads. P says, besides the problem of int8_gemm.h:
//   normalizes, keeps, quantizes (Quantizer), encodes (the codes are read, not the scales alone),
//   scale_per_channel, multiplies, eps, divisor, min_scale, Norm
// All of a row's arithmetic is float32 on vectors of 16, sums in four of them, added pairwise at the
// end: the order, and with it every bit, is the same on every instruction set.
#ifndef QINDUCTOR_INT8_ROWS_H
#define QINDUCTOR_INT8_ROWS_H
#include <limits>
namespace qinductor {

enum class Quantizer { none, fixed, per_token };

template <class P>
struct RowArgs {
  const typename P::Norm* norm_weight;
  const typename P::Norm* norm_bias;
  const float* inverse_scale;
  const int32_t* zero_point;
  const float* multiplier;
  float* kept;
  uint8_t* codes;
  float* scales;
};

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(16)));
constexpr int64_t kLanes = 16;

// The first C elements at p, zero behind them.
template <int64_t C, class T>
inline Floats load_floats(const T* p) {
  Floats v = {};
  if constexpr (C == kLanes && std::is_same_v<T, float>) {
    std::memcpy(&v, p, sizeof v);
  } else {
    for (int64_t l = 0; l < C; ++l) v[l] = static_cast<float>(p[l]);
  }
  return v;
}
template <int64_t C>
inline void store_floats(float* p, Floats v) {
  std::memcpy(p, &v, C * sizeof(float));
}

// Calls f.operator()<C>(j) for the C columns from j on: 16 at a time, then what is left.
template <int64_t N, class F>
inline void over_row(const F& f) {
  constexpr int64_t whole = N / kLanes * kLanes;
  for (int64_t j = 0; j < whole; j += kLanes) f.template operator()<kLanes>(j);
  if constexpr (whole < N) f.template operator()<N - whole>(whole);
}

// Sum over a row of a function of its elements.
template <int64_t N, class F>
inline float row_sum(const float* y, const F& term) {
  Floats part[4] = {};
  constexpr int64_t step = 4 * kLanes, most = N / step * step;
  const auto add = [&]<int64_t C>(int64_t j, int p) {
    Floats v = term(load_floats<C>(y + j));
    for (int64_t l = C; l < kLanes; ++l) v[l] = 0.0f;
    part[p] += v;
  };
  for (int64_t j = 0; j < most; j += step)
    for (int p = 0; p < 4; ++p) add.template operator()<kLanes>(j + p * kLanes, p);
  over_row<N - most>([&]<int64_t C>(int64_t j) {
    add.template operator()<C>(most + j, static_cast<int>(j / kLanes));
  });
  Floats sum = (part[0] + part[1]) + (part[2] + part[3]);
  for (int width = 8; width > 0; width /= 2)
    for (int l = 0; l < width; ++l) sum[l] += sum[l + width];
  return sum[0];
}

// The largest magnitude of a row, collected by vectors. Without their sign floats are ordered like
// integers, infinity above all numbers and NaN above infinity, as torch.amax has it.
struct Magnitude {
  Ints top = {};
  void add(Floats v) {
    const Ints magnitude = reinterpret_cast<Ints>(v) & 0x7fffffff;
    top = magnitude > top ? magnitude : top;
  }
  float largest() const {
    int32_t bits = top[0];
    for (int64_t l = 1; l < kLanes; ++l) bits = std::max(bits, top[l]);
    float amax;
    std::memcpy(&amax, &bits, sizeof amax);
    return amax;
  }
};

// Adding 1.5 * 2**23 rounds to nearest even where the magnitude is below 2**22, and leaves the
// integer in the low bits.
template <int64_t C>
inline void store_rounded(uint8_t* codes, Floats t, int32_t zero_point) {
  const Floats shifted = t + 12582912.0f;
  const Bytes bytes = __builtin_convertvector(reinterpret_cast<Ints>(shifted) + zero_point, Bytes);
  std::memcpy(codes, &bytes, C);
}

// codes = clamp(round(y * inverse) + zero_point, 0, 255); a NaN becomes 0. The bounds are integers,
// so clamping before the rounding is the same.
template <int64_t C>
inline void store_codes(uint8_t* codes, Floats y, Floats inverse, int32_t zero_point) {
  const float low = static_cast<float>(-zero_point), high = static_cast<float>(255 - zero_point);
  Floats t = y * inverse;
  t = t > low ? t : Floats{} + low;  // a NaN too
  t = t < high ? t : Floats{} + high;
  store_rounded<C>(codes, t, zero_point);
}

// y -> (y - mean) / sqrt(variance + eps), by the mean and the factor.
template <class P>
struct Normal {
  float mean = 0.0f, factor = 1.0f;
  explicit Normal(const float* y) {
    if constexpr (P::normalizes) {
      mean = row_sum<P::N>(y, [](Floats v) { return v; }) / static_cast<float>(P::N);
      const float squares = row_sum<P::N>(y, [&](Floats v) { return (v - mean) * (v - mean); });
      factor = 1.0f / std::sqrt(squares / static_cast<float>(P::N) + P::eps);
    }
  }
  template <int64_t C>
  Floats of(const float* y, int64_t j, const RowArgs<P>& r) const {
    const Floats v = load_floats<C>(y + j);
    if constexpr (!P::normalizes) return v;
    return (v - mean) * factor * load_floats<C>(r.norm_weight + j) + load_floats<C>(r.norm_bias + j);
  }
};

// What a quantizer per token sees of v.
template <int64_t C, class P>
inline Floats multiplied(Floats v, int64_t j, const RowArgs<P>& r) {
  if constexpr (P::multiplies) v = v * load_floats<C>(r.multiplier + j);
  return v;
}

// What happens to one row when all of its columns are there. One pass over it, after those of the
// mean and the variance; codes with a scale of their own take one more.
template <class P>
inline void finish_row(float* y, int64_t row, const RowArgs<P>& r) {
  const Normal<P> normal(y);
  const Floats zero = {};
  Magnitude magnitude;
  float* kept = P::keeps ? r.kept + row * P::N : y;
  uint8_t* codes = r.codes + row * P::N;
  over_row<P::N>([&]<int64_t C>(int64_t j) {
    const Floats v = normal.template of<C>(y, j, r);
    if constexpr (P::keeps || P::normalizes) store_floats<C>(kept + j, v);
    if constexpr (P::quantizes == Quantizer::per_token) magnitude.add(multiplied<C>(v, j, r));
    if constexpr (P::quantizes == Quantizer::fixed && P::encodes) {
      const float* inverse = r.inverse_scale;
      Floats factor = zero + *inverse;
      if constexpr (P::scale_per_channel) factor = load_floats<C>(inverse + j);
      store_codes<C>(codes + j, v, factor, *r.zero_point);
    }
  });
  if constexpr (P::quantizes == Quantizer::per_token) {
    const float amax = magnitude.largest() / P::divisor;
    const float scale = amax < P::min_scale ? P::min_scale : amax;
    const Floats inverse = zero + 1.0f / scale;
    if (r.scales != nullptr) r.scales[row] = scale;
    if constexpr (!P::encodes) return;
    // Up to 127 nothing is outside of the codes, unless the row has an infinity or a NaN.
    const bool inside = P::divisor <= 127.0f && amax <= std::numeric_limits<float>::max();
    over_row<P::N>([&]<int64_t C>(int64_t j) {
      const Floats t = multiplied<C>(load_floats<C>(kept + j), j, r);
      if (inside) {
        store_rounded<C>(codes + j, t * inverse, 128);
      } else {
        store_codes<C>(codes + j, t, inverse, 128);
      }
    });
  }
}

// With rows enough for all threads each takes a run of them, `row_limit` at a time. With few rows
// that would have every thread read all weights: then the panels are dealt out, into shared rows.
template <class Isa, class P>
inline void gemm_rows(const Args<P>& a, const RowArgs<P>& r, int64_t M, int64_t row_limit) {
  if (M == 0) return;
  constexpr int64_t panels = Sizes<P>::panels;
  const int64_t most = omp_get_max_threads();
  if (M >= most * 4 * Isa::rows) {
    const int64_t tiles = (M + Isa::rows - 1) / Isa::rows;
#pragma omp parallel num_threads(most) if (most > 1)
    {
      const int64_t t = omp_get_thread_num(), count = omp_get_num_threads();
      const int64_t first = std::min(M, tiles * t / count * Isa::rows);
      const int64_t last = std::min(M, tiles * (t + 1) / count * Isa::rows);
      const int64_t block = rows_of_block<Isa>(std::max<int64_t>(last - first, 1), row_limit);
      const auto stage = scratch<float>(block * P::N);
      for (int64_t row = first; row < last; row += block) {
        const int64_t end = std::min(last, row + block);
        Args<P> staged = a;
        staged.out = stage.get() - row * P::N;
        for (int64_t p = 0; p < panels; ++p) Isa::template block<P>(staged, Panel<P>(staged, p), row, end);
        for (int64_t at = row; at < end; ++at) finish_row<P>(staged.out + at * P::N, at, r);
      }
    }
    return;
  }
  const auto stage = scratch<float>(M * P::N);
  Args<P> staged = a;
  staged.out = stage.get();
  const int64_t threads = std::min(most, panels);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t t = omp_get_thread_num(), count = omp_get_num_threads();
    for (int64_t p = panels * t / count; p < panels * (t + 1) / count; ++p)
      Isa::template block<P>(staged, Panel<P>(staged, p), 0, M);
#pragma omp barrier
    for (int64_t at = M * t / count; at < M * (t + 1) / count; ++at)
      finish_row<P>(staged.out + at * P::N, at, r);
  }
}

}  // namespace qinductor
#endif
