// Gated activations: activation(gate) times up, forward and backward, bf16 with fp32 inside. Compiled at run time
// by NVRTC; no headers.
//
// A row of `fused` has `width` gates and as many ups, in turn or one after another; a row of the output has `width`
// numbers. A block has a row, or a piece of it. Sizes are checked by the caller. What is no number stays so.

typedef unsigned int u32;
typedef unsigned short bf16;  // bits only

__device__ __forceinline__ float widen(u32 x) { return __uint_as_float(x << 16); }

// To the nearest, ties to even.
__device__ __forceinline__ bf16 narrow(float x) {
  const u32 bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

struct Pair {
  float gate, up;
};

// Gate and up at `column` of a row.
__device__ __forceinline__ Pair load(const bf16* row, int column, int width, int in_turn) {
  if (in_turn) {
    const u32 both = ((const u32*)row)[column];
    return {widen(both & 0xffffu), widen(both >> 16)};
  }
  return {widen(row[column]), widen(row[width + column])};
}

__device__ __forceinline__ void store(bf16* row, int column, int width, int in_turn, float gate, float up) {
  if (in_turn) {
    ((u32*)row)[column] = (u32)narrow(gate) | (u32)narrow(up) << 16;
  } else {
    row[column] = narrow(gate);
    row[width + column] = narrow(up);
  }
}

#define PLACE                                                  \
  const int column = blockIdx.y * blockDim.x + threadIdx.x;    \
  if (column >= width) return;                                 \
  const long long row = blockIdx.x;                            \
  fused += row * 2 * width;

// silu(gate) up
extern "C" __global__ void silu_forward(const bf16* __restrict__ fused, bf16* __restrict__ output, int width,
                                        int in_turn) {
  PLACE
  const Pair it = load(fused, column, width, in_turn);
  output[row * width + column] = narrow(it.gate * sigmoid(it.gate) * it.up);
}

extern "C" __global__ void silu_backward(const bf16* __restrict__ fused, const bf16* __restrict__ gradient,
                                         bf16* __restrict__ result, int width, int in_turn) {
  PLACE
  const Pair it = load(fused, column, width, in_turn);
  const float upstream = widen(gradient[row * width + column]), share = sigmoid(it.gate);
  store(result + row * 2 * width, column, width, in_turn,
        upstream * it.up * share * (1.0f + it.gate * (1.0f - share)), upstream * it.gate * share);
}

// (up + 1) gate sigmoid(alpha gate), the gate at most `limit`, up between its negative and it.
extern "C" __global__ void clamped_forward(const bf16* __restrict__ fused, bf16* __restrict__ output, int width,
                                           int in_turn, float alpha, float limit) {
  PLACE
  const Pair it = load(fused, column, width, in_turn);
  const float gate = it.gate > limit ? limit : it.gate;
  const float up = it.up > limit ? limit : it.up < -limit ? -limit : it.up;
  output[row * width + column] = narrow((up + 1.0f) * gate * sigmoid(alpha * gate));
}

// What is clipped has no gradient.
extern "C" __global__ void clamped_backward(const bf16* __restrict__ fused, const bf16* __restrict__ gradient,
                                            bf16* __restrict__ result, int width, int in_turn, float alpha,
                                            float limit) {
  PLACE
  const Pair it = load(fused, column, width, in_turn);
  const float upstream = widen(gradient[row * width + column]);
  const float gate = it.gate > limit ? limit : it.gate;
  const float up = it.up > limit ? limit : it.up < -limit ? -limit : it.up;
  const float share = sigmoid(alpha * gate);
  store(result + row * 2 * width, column, width, in_turn,
        it.gate > limit ? 0.0f : upstream * (up + 1.0f) * share * (1.0f + alpha * gate * (1.0f - share)),
        it.up > limit || it.up < -limit ? 0.0f : upstream * gate * share);
}
