// Sigmoid attention in float32 for processors with AVX-512: what native code would give (benchmarks/native_trial.py).
//
// A trial, not part of the package. Dense, full or causal, heads of 64, lengths that are multiples of 64, a number as bias.
// All tensors are (heads, n, 64) and contiguous. Products are made in microtiles of 6 × 64 numbers, 24 registers.

#include <immintrin.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <type_traits>

namespace {

constexpr int D = 64;  // head size
constexpr int TILE = 64;  // columns of a microtile: four registers
constexpr int ROWS = 6;  // its rows
using vec = __m512;

inline vec exponential(vec x) {
  const vec n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 0);
  vec r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145751953125f), x);  // x - n log 2, in two steps
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.428606765330187045e-6f), r);
  vec p = _mm512_set1_ps(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

inline vec sigmoid(vec x) {
  const vec one = _mm512_set1_ps(1.0f);
  const vec d = _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), x)));
  const vec r = _mm512_rcp14_ps(d);
  const vec y = _mm512_fmadd_ps(r, _mm512_fnmadd_ps(d, r, one), r);  // one step of Newton's method
  return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(d, _mm512_set1_ps(3e38f), _CMP_GT_OQ), _mm512_setzero_ps());
}

// sums[m][:] += Σ_k a[m · row + k · column] · b[k · TILE : …]
template <int R>
inline void multiply(const float* a, long row, long column, const float* b, int size, vec (&sums)[R][4]) {
  for (int k = 0; k < size; k++, b += TILE) {
    const vec b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(b + 16), b2 = _mm512_loadu_ps(b + 32), b3 = _mm512_loadu_ps(b + 48);
#pragma GCC unroll 6
    for (int m = 0; m < R; m++) {
      const vec x = _mm512_set1_ps(a[m * row + k * column]);
      sums[m][0] = _mm512_fmadd_ps(x, b0, sums[m][0]);
      sums[m][1] = _mm512_fmadd_ps(x, b1, sums[m][1]);
      sums[m][2] = _mm512_fmadd_ps(x, b2, sums[m][2]);
      sums[m][3] = _mm512_fmadd_ps(x, b3, sums[m][3]);
    }
  }
}

// c (R, 64) += a b
template <int R>
void add_product(const float* a, long row, long column, const float* b, int size, float* c) {
  vec sums[R][4];
#pragma GCC unroll 24
  for (int i = 0; i < 4 * R; i++) sums[i / 4][i % 4] = _mm512_loadu_ps(c + 16 * i);
  multiply<R>(a, row, column, b, size, sums);
#pragma GCC unroll 24
  for (int i = 0; i < 4 * R; i++) _mm512_storeu_ps(c + 16 * i, sums[i / 4][i % 4]);
}

// p (R, TILE) = σ(scale · q k + bias); row m sees the columns up to last + m
template <int R>
void weights(const float* q, const float* k, float scale, float bias, int last, float* p, long row) {
  vec sums[R][4] = {};
  multiply<R>(q, D, 1, k, D, sums);
#pragma GCC unroll 24
  for (int i = 0; i < 4 * R; i++) {
    vec w = sigmoid(_mm512_fmadd_ps(sums[i / 4][i % 4], _mm512_set1_ps(scale), _mm512_set1_ps(bias)));
    const int visible = last + i / 4 + 1 - 16 * (i % 4);
    if (visible < 16) w = _mm512_maskz_mov_ps(visible <= 0 ? 0 : (1u << visible) - 1, w);
    _mm512_storeu_ps(p + (i / 4) * row + 16 * (i % 4), w);
  }
}

// s (R, TILE) = scale · p (1 - p) · (g v), the gradient of the products of queries and keys
template <int R>
void score_gradient(const float* g, const float* v, const float* p, float scale, float* s) {
  vec sums[R][4] = {};
  multiply<R>(g, D, 1, v, D, sums);
#pragma GCC unroll 24
  for (int i = 0; i < 4 * R; i++) {
    const vec w = _mm512_loadu_ps(p + 16 * i);
    const vec slope = _mm512_mul_ps(_mm512_fnmadd_ps(w, w, w), _mm512_set1_ps(scale));
    _mm512_storeu_ps(s + 16 * i, _mm512_mul_ps(sums[i / 4][i % 4], slope));
  }
}

// Calls f(first row, number of rows as a constant) for all microtiles of `rows` rows.
template <class F>
void over_rows(int rows, F f) {
  int m = 0;
  for (; m + ROWS <= rows; m += ROWS) f(m, std::integral_constant<int, ROWS>());
  switch (rows - m) {
    case 5: f(m, std::integral_constant<int, 5>()); break;
    case 4: f(m, std::integral_constant<int, 4>()); break;
    case 3: f(m, std::integral_constant<int, 3>()); break;
    case 2: f(m, std::integral_constant<int, 2>()); break;
    case 1: f(m, std::integral_constant<int, 1>()); break;
  }
}

// (n, D) to tiles of (D, TILE)
void transpose(const float* x, float* tiles, int n) {
  for (int t = 0; t < n; t += TILE)
    for (int i = 0; i < TILE; i++)
      for (int d = 0; d < D; d++) tiles[(long)t * D + d * TILE + i] = x[(long)(t + i) * D + d];
}

}  // namespace

extern "C" {

// scratch: as many numbers as q has
void forward(const float* q, const float* k, const float* v, float* o, int heads, int n, float scale, float bias, int causal,
             float* scratch) {
  constexpr int BLOCK = 192, WIDTH = 2 * TILE;  // rows and columns that are computed before the next ones
  const long size = (long)n * D;
#pragma omp parallel for schedule(static)
  for (int h = 0; h < heads; h++) transpose(k + h * size, scratch + h * size, n);
  const int blocks = (n + BLOCK - 1) / BLOCK;
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int h = 0; h < heads; h++)
    for (int t = blocks - 1; t >= 0; t--) {
      const int first = t * BLOCK, rows = std::min(BLOCK, n - first);
      const long at = h * size + (long)first * D;
      std::memset(o + at, 0, sizeof(float) * rows * D);
      float p[ROWS * WIDTH];
      for (int c = 0; c < n && !(causal && c >= first + rows); c += WIDTH)
        over_rows(rows, [&](int m, auto count) {
          constexpr int R = decltype(count)::value;
          if (causal && c >= first + m + R) return;
          const int width = std::min(WIDTH, n - c);
          for (int w = 0; w < width; w += TILE) {
            const int last = causal ? first + m - c - w : INT_MAX / 2;
            weights<R>(q + at + m * D, scratch + h * size + (long)(c + w) * D, scale, bias, last, p + w, WIDTH);
          }
          add_product<R>(p, WIDTH, 1, v + h * size + (long)c * D, width, o + at + m * D);
        });
    }
}

// g: gradient of the output. scratch: twice as many numbers as q has
void backward(const float* q, const float* k, const float* v, const float* g, float* dq, float* dk, float* dv, int heads, int n,
              float scale, float bias, int causal, float* scratch) {
  constexpr int BLOCK = 96;
  const long size = (long)n * D;
#pragma omp parallel for schedule(dynamic)
  for (int h = 0; h < heads; h++) {
    const long head = h * size;
    float *keys = scratch + 2 * head, *values = keys + size;
    transpose(k + head, keys, n);
    transpose(v + head, values, n);
    for (float* x : {dq, dk, dv}) std::memset(x + head, 0, sizeof(float) * size);
    float p[BLOCK * TILE], s[BLOCK * TILE];
    for (int c = 0; c < n; c += TILE)
      for (int first = causal ? c / BLOCK * BLOCK : 0; first < n; first += BLOCK) {
        const int rows = std::min(BLOCK, n - first);
        const long at = head + (long)first * D, column = (long)c * D;
        over_rows(rows, [&](int m, auto count) {
          constexpr int R = decltype(count)::value;
          const int last = causal ? first + m - c : INT_MAX / 2;
          weights<R>(q + at + m * D, keys + column, scale, bias, last, p + m * TILE, TILE);
          score_gradient<R>(g + at + m * D, values + column, p + m * TILE, scale, s + m * TILE);
          add_product<R>(s + m * TILE, TILE, 1, k + head + column, TILE, dq + at + m * D);
        });
        over_rows(TILE, [&](int m, auto count) {
          constexpr int R = decltype(count)::value;
          add_product<R>(p + m, 1, TILE, g + at, rows, dv + head + column + m * D);
          add_product<R>(s + m, 1, TILE, q + at, rows, dk + head + column + m * D);
        });
      }
  }
}
}
