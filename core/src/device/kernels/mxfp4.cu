// Products with matrices packed in MXFP4, and their expansion to bf16. Compiled at run time by NVRTC for the
// device at hand (compute capability 8.0 and above); no headers.
//
// A matrix [num_rows, 32 num_groups] is stored as codes, 16 bytes per group of 32 (byte b holds element 2b
// in its low half and 2b+1 in its high half), and one exponent byte per group. All sizes and layouts are
// checked by the caller.

typedef unsigned int u32;
typedef unsigned short bf16;  // bits only

// ---- What the hardware offers -------------------------------------------------------------------------------

// Two products of bf16. Adding -0 changes no product; a plain product of bf16 needs compute capability 9.0.
__device__ __forceinline__ u32 multiply2(u32 a, u32 b) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
  return d;
}

// sum += A B, A of 16 x 16 and B of 16 x 8 in bf16, the sum in fp32. With g = lane / 4 and t = lane % 4, the
// two halves of a0 are A[g][2t, 2t+1], of a1 A[g+8][2t, 2t+1], of a2 A[g][2t+8, 2t+9], of a3
// A[g+8][2t+8, 2t+9], of b0 B[2t, 2t+1][g], of b1 B[2t+8, 2t+9][g]; sum is [g][2t], [g][2t+1], [g+8][2t],
// [g+8][2t+1].
__device__ __forceinline__ void multiply_tiles(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// ---- Numbers ------------------------------------------------------------------------------------------------

// Round to nearest even.
__device__ __forceinline__ bf16 to_bf16(float value) {
  const u32 bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// 2^(exponent - 127) as bf16. 0 is subnormal; 255 is not a number.
__device__ __forceinline__ u32 scale_of(u32 exponent) {
  return exponent == 0 ? 0x0040u : exponent == 255 ? 0x7fc0u : exponent << 7;
}

__device__ __forceinline__ u32 twice(u32 half) { return half | half << 16; }

// Expands the four codes in each half of `codes`, times the bf16 in the same half of `scale`: values[i] holds
// those of code i of both halves. The bits of a code, put where bf16 keeps the sign, the low bits of the
// exponent and the high bit of the fraction, are its value times 2^-126, subnormal ones included.
__device__ __forceinline__ void expand(u32 codes, u32 scale, u32 (&values)[4]) {
  values[0] = (codes << 12 & 0x80008000u) | (codes << 6 & 0x01c001c0u);
  values[1] = (codes << 8 & 0x80008000u) | (codes << 2 & 0x01c001c0u);
  values[2] = (codes << 4 & 0x80008000u) | (codes >> 2 & 0x01c001c0u);
  values[3] = (codes & 0x80008000u) | (codes >> 6 & 0x01c001c0u);
  // Two products: 2^126 times the scale may be too large for one factor.
#pragma unroll
  for (int i = 0; i < 4; i++) values[i] = multiply2(multiply2(values[i], 0x7e807e80u), scale);
}

// ---- Kernels ------------------------------------------------------------------------------------------------

// Eight codes per thread: reads and writes of a warp are without gaps.
extern "C" __global__ void mxfp4_expand(const u32* __restrict__ codes, const unsigned char* __restrict__ scales,
                                        uint4* __restrict__ values, long long num_words) {
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long word = (long long)blockIdx.x * blockDim.x + threadIdx.x; word < num_words; word += step) {
    u32 pairs[4];  // elements i and i + 4
    expand(__ldg(codes + word), twice(scale_of(__ldg(scales + (word >> 2)))), pairs);
    values[word] = make_uint4(low_halves(pairs[0], pairs[1]), low_halves(pairs[2], pairs[3]),
                              high_halves(pairs[0], pairs[1]), high_halves(pairs[2], pairs[3]));
  }
}

// 16 rows of an expert's matrix times up to 8 * NUM_TILES of its slots, by one warp. A lane expands whole
// groups: which columns meet in one product does not matter as long as both factors agree.
template <int NUM_TILES>
__device__ __forceinline__ void forward_tiles(const uint4* const (&codes)[2], const unsigned char* const (&scales)[2],
                                              const bf16* __restrict__ x, bf16* __restrict__ y, int slot, int end,
                                              int row, int num_rows, int num_groups) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float sums[NUM_TILES][4] = {};
  const uint4* inputs[NUM_TILES];
#pragma unroll
  for (int tile = 0; tile < NUM_TILES; tile++) {
    // Columns behind the last slot repeat it; nobody stores them.
    const int column = min(slot + 8 * tile + g, end - 1);
    inputs[tile] = (const uint4*)(x + (long long)column * num_groups * 32);
  }
  // Loaded a turn ahead: a warp computes about as long as memory takes to answer.
  uint4 words[2], next_words[2] = {};
  u32 exponents[2], next_exponents[2] = {};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (t < num_groups) {
      next_words[half] = __ldg(codes[half] + t);
      next_exponents[half] = __ldg(scales[half] + t);
    }
  }
  for (int group = t; group - t < num_groups; group += 4) {
    const bool is_inside = group < num_groups, is_next = group + 4 < num_groups;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      words[half] = next_words[half];
      exponents[half] = next_exponents[half];
      // What lies behind the last group is zero, in both factors.
      next_words[half] = make_uint4(0, 0, 0, 0);
      next_exponents[half] = 0;
      if (is_next) {
        next_words[half] = __ldg(codes[half] + group + 4);
        next_exponents[half] = __ldg(scales[half] + group + 4);
      }
    }
    const u32 scale[2] = {twice(scale_of(exponents[0])), twice(scale_of(exponents[1]))};
#pragma unroll
    for (int word = 0; word < 4; word++) {
      u32 upper[4], lower[4];
      const u32 pair[2] = {word == 0 ? words[0].x : word == 1 ? words[0].y : word == 2 ? words[0].z : words[0].w,
                           word == 0 ? words[1].x : word == 1 ? words[1].y : word == 2 ? words[1].z : words[1].w};
      expand(pair[0], scale[0], upper);
      expand(pair[1], scale[1], lower);
#pragma unroll
      for (int tile = 0; tile < NUM_TILES; tile++) {
        uint4 input = make_uint4(0, 0, 0, 0);
        if (is_inside) input = __ldg(inputs[tile] + group * 4 + word);
        multiply_tiles(sums[tile], upper[0], lower[0], upper[1], lower[1], low_halves(input.x, input.z),
                       high_halves(input.x, input.z));
        multiply_tiles(sums[tile], upper[2], lower[2], upper[3], lower[3], low_halves(input.y, input.w),
                       high_halves(input.y, input.w));
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < NUM_TILES; tile++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int column = slot + 8 * tile + 2 * t + i % 2;
      const int output = row + g + 8 * (i / 2);
      if (column < end && output < num_rows) y[(long long)column * num_rows + output] = to_bf16(sums[tile][i]);
    }
  }
}

// y[slot] = W_e x[slot] for the slots of each expert e, which are those before ends[e]. blockIdx.y is the
// expert; every warp has 16 rows of its matrix. The codes of one expert are expanded once per 32 slots.
extern "C" __global__ void __launch_bounds__(128)
    mxfp4_forward(const uint4* __restrict__ codes, const unsigned char* __restrict__ scales,
                  const bf16* __restrict__ x, const int* __restrict__ ends, bf16* __restrict__ y, int num_rows,
                  int num_groups) {
  const int expert = blockIdx.y;
  int slot = expert == 0 ? 0 : ends[expert - 1];
  const int end = ends[expert];
  const int row = (blockIdx.x * 4 + threadIdx.x / 32) * 16;
  if (row >= num_rows) return;
  const uint4* row_codes[2];
  const unsigned char* row_scales[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    // Rows behind the last one repeat it.
    const int mine = min(row + (int)(threadIdx.x % 32) / 4 + 8 * half, num_rows - 1);
    const long long start = ((long long)expert * num_rows + mine) * num_groups;
    row_codes[half] = codes + start;
    row_scales[half] = scales + start;
  }
  while (slot < end) {
    if (end - slot > 16) {
      forward_tiles<4>(row_codes, row_scales, x, y, slot, end, row, num_rows, num_groups);
      slot += 32;
    } else if (end - slot > 8) {
      forward_tiles<2>(row_codes, row_scales, x, y, slot, end, row, num_rows, num_groups);
      slot += 16;
    } else {
      forward_tiles<1>(row_codes, row_scales, x, y, slot, end, row, num_rows, num_groups);
      slot += 8;
    }
  }
}

// Warps of a block that share the rows of a matrix in mxfp4_backward.
#define BACKWARD_WARPS 8

// 128 columns of the transposed matrix of an expert times up to 8 * NUM_TILES of its slots, by one block. A
// lane has half a group, 16 columns; the warps take 16 rows in turn and are added up at the end, in order.
template <int NUM_TILES>
__device__ __forceinline__ void backward_tiles(const uint2* __restrict__ codes,
                                               const unsigned char* __restrict__ scales,
                                               const bf16* __restrict__ dy, bf16* __restrict__ dx, int slot, int end,
                                               int num_rows, int num_groups,
                                               float (&partial)[BACKWARD_WARPS][32][32]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int half_group = blockIdx.x * 8 + g;
  const bool is_column = half_group < 2 * num_groups;
  float sums[NUM_TILES][8][4] = {};
  const bf16* outputs[NUM_TILES];
#pragma unroll
  for (int tile = 0; tile < NUM_TILES; tile++) {
    const int column = min(slot + 8 * tile + g, end - 1);
    outputs[tile] = dy + (long long)column * num_rows;
  }
#pragma unroll 2
  for (int first = warp * 16; first < num_rows; first += BACKWARD_WARPS * 16) {
    const int row = first + 4 * t;
    // The number of rows is a multiple of 4.
    const bool is_row = row < num_rows;
    uint2 words[4] = {};
    u32 scale[4] = {};
    if (is_row && is_column) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        words[i] = __ldg(codes + (long long)(row + i) * num_groups * 2 + half_group);
        scale[i] = scale_of(__ldg(scales + (long long)(row + i) * num_groups + half_group / 2));
      }
    }
    const u32 first_scales = scale[0] | scale[1] << 16, last_scales = scale[2] | scale[3] << 16;
    uint2 factors[NUM_TILES];
#pragma unroll
    for (int tile = 0; tile < NUM_TILES; tile++) {
      factors[tile] = make_uint2(0, 0);
      if (is_row) factors[tile] = __ldg((const uint2*)(outputs[tile] + row));
    }
#pragma unroll
    for (int quarter = 0; quarter < 4; quarter++) {
      const u32 w0 = quarter < 2 ? words[0].x : words[0].y, w1 = quarter < 2 ? words[1].x : words[1].y;
      const u32 w2 = quarter < 2 ? words[2].x : words[2].y, w3 = quarter < 2 ? words[3].x : words[3].y;
      u32 first_rows[4], last_rows[4];  // of four columns
      expand(quarter % 2 == 0 ? low_halves(w0, w1) : high_halves(w0, w1), first_scales, first_rows);
      expand(quarter % 2 == 0 ? low_halves(w2, w3) : high_halves(w2, w3), last_scales, last_rows);
#pragma unroll
      for (int tile = 0; tile < NUM_TILES; tile++) {
        multiply_tiles(sums[tile][2 * quarter], first_rows[0], first_rows[1], last_rows[0], last_rows[1],
                       factors[tile].x, factors[tile].y);
        multiply_tiles(sums[tile][2 * quarter + 1], first_rows[2], first_rows[3], last_rows[2], last_rows[3],
                       factors[tile].x, factors[tile].y);
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < NUM_TILES; tile++) {
    __syncthreads();  // what was read of `partial` before
#pragma unroll
    for (int i = 0; i < 32; i++) partial[warp][i][lane] = sums[tile][i / 4][i % 4];
    __syncthreads();
    // Warp w now has columns 2w and 2w + 1 of every lane's sixteen.
    float total[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      for (int part = 0; part < BACKWARD_WARPS; part++) total[i] += partial[part][4 * warp + i][lane];
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = slot + 8 * tile + 2 * t + i;
      if (is_column && column < end) {
        const long long place = (long long)column * num_groups * 32 + half_group * 16 + 2 * warp;
        *(u32*)(dx + place) = (u32)to_bf16(total[i]) | (u32)to_bf16(total[i + 2]) << 16;
      }
    }
  }
}

// dx[slot] = W_e^T dy[slot], likewise. blockIdx.x counts stretches of 128 columns.
extern "C" __global__ void __launch_bounds__(BACKWARD_WARPS * 32)
    mxfp4_backward(const uint2* __restrict__ codes, const unsigned char* __restrict__ scales,
                   const bf16* __restrict__ dy, const int* __restrict__ ends, bf16* __restrict__ dx, int num_rows,
                   int num_groups) {
  __shared__ float partial[BACKWARD_WARPS][32][32];
  const int expert = blockIdx.y;
  int slot = expert == 0 ? 0 : ends[expert - 1];
  const int end = ends[expert];
  const long long start = (long long)expert * num_rows * num_groups;
  while (slot < end) {
    if (end - slot > 8) {
      backward_tiles<2>(codes + start * 2, scales + start, dy, dx, slot, end, num_rows, num_groups, partial);
      slot += 16;
    } else {
      backward_tiles<1>(codes + start * 2, scales + start, dy, dx, slot, end, num_rows, num_groups, partial);
      slot += 8;
    }
  }
}
