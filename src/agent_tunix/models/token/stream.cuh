// The residual stream, and products with what is read of it or left by other blocks.
//
// Left operands, sixteen rows, and sums are held as the matrix units have them: of a tile of eight columns a lane has rows
// lane / 4 and eight more, and of each the neighbouring columns 2 (lane % 4) and the next. A sum over inputs is cut over the
// warps, each of which has the same columns of the residual stream throughout.

#pragma once
#include "ring.cuh"

struct Stream {
  u32 x[TILES][2];  // the stream
  uint4 h[STEPS];   // what a block of the model reads of it
};

// Where a tile is left that others will read as part of a left operand: two neighbours together.
int tile_at(int tile, int lane) { return (tile / 2 * 32 + lane) * 4 + tile % 2 * 2; }

float2 inverse_roots(float (&shared)[ROWS][WARPS], int thread, float2 squares) {
  for (int lane = 1; lane < 4; lane *= 2)
    squares.x += __shfl_xor_sync(~0u, squares.x, lane), squares.y += __shfl_xor_sync(~0u, squares.y, lane);
  const int warp = thread / 32, row = thread % 32 / 4;
  if (thread % 4 == 0) shared[row][warp] = squares.x, shared[row + 8][warp] = squares.y;
  synchronise();
  float2 total = {0, 0};
#pragma unroll
  for (int w = 0; w < WARPS; w += 4) {
    const float4 a = *(const float4*)&shared[row][w], b = *(const float4*)&shared[row + 8][w];
    total.x += (a.x + a.y) + (a.z + a.w), total.y += (b.x + b.y) + (b.z + b.w);
  }
  return {rsqrtf(total.x * (1.0f / WIDTH) + EPS), rsqrtf(total.y * (1.0f / WIDTH) + EPS)};
}

// Has a warp's scales of two norms brought: of that after a block of the model and that before the next.
void ask_for_scales(Shared& shared, const float* scales, int which) {
  const int thread = this_thread(), warp = thread / 32;
  __syncwarp();
  for (int n = thread % 32; n < 2 * SCALE_BYTES / 16; n += 32)
    copy_ahead(address(shared.scales[warp]) + n * 16, scales + (which * WARPS + warp) * (2 * SCALE_BYTES / 4) + n * 4);
}
float2 scales_of(const Shared& shared, int which, int thread, int tile) {
  return *(const float2*)(shared.scales[thread / 32] + which * SCALE_BYTES + tile * 32 + thread % 4 * 8);
}

// What the next block of the model reads.
void read_stream(Shared& shared, Stream& stream, int thread) {
  float2 squares = {0, 0};
#pragma unroll
  for (int n = 0; n < TILES; n++) {
    const u32(&x)[2] = stream.x[n];
    squares.x += first(x[0]) * first(x[0]) + second(x[0]) * second(x[0]);
    squares.y += first(x[1]) * first(x[1]) + second(x[1]) * second(x[1]);
  }
  const float2 inverse = inverse_roots(shared.squares[1], thread, squares);
  auto normed = [&](int n) {
    const float2 scale = scales_of(shared, 1, thread, n);
    const u32(&x)[2] = stream.x[n];
    return make_uint2(pack(first(x[0]) * (inverse.x * scale.x), second(x[0]) * (inverse.x * scale.y)),
                      pack(first(x[1]) * (inverse.y * scale.x), second(x[1]) * (inverse.y * scale.y)));
  };
#pragma unroll
  for (int n = 0; n < STEPS; n++) {
    const uint2 left = normed(2 * n), right = normed(2 * n + 1);
    stream.h[n] = make_uint4(left.x, left.y, right.x, right.y);
  }
}

// The first reading, of the embedded tokens.
void begin_stream(Shared& shared, Stream& stream, const bf16* x, const float* scales) {
  ask_for_scales(shared, scales, 0);
  const int thread = this_thread(), warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      stream.x[n][half] = *(const u32*)(x + (half * 8 + g) * WIDTH + (warp * TILES + n) * 8 + t * 2);
  await_copies();
  __syncwarp();
  read_stream(shared, stream, thread);
}

// A warp's columns of the output of a block of the model: of its tiles, and of the last of them, which are h A, times B.
void collect_output(Ring& ring, float4 (&d)[TILES], const u32* tiles, int warp, int lane) {
  constexpr int EACH = LOW / 4, SLOTS = TILES * EACH / STEPS;  // pieces of B to a tile, slots that they take
  static_assert(SLOTS <= RING, "slots");
  uint4 low[LOW / 2], pairs[STEPS];
  collect(low, [&](int n) { return tiles + ((WIDTH / 16 + n) * 32 + lane) * 4; });
  collect(pairs, [&](int n) { return tiles + ((warp * STEPS + n) * 32 + lane) * 4; });
#pragma unroll
  for (int n = 0; n < STEPS; n++) {
    d[2 * n] = {first(pairs[n].x), second(pairs[n].x), first(pairs[n].y), second(pairs[n].y)};
    d[2 * n + 1] = {first(pairs[n].z), second(pairs[n].z), first(pairs[n].w), second(pairs[n].w)};
  }
  ring.await_slots(SLOTS, lane);
#pragma unroll
  for (int n = 0; n < TILES * EACH; n++) {
    const uint4 b = piece(ring.slot(n / STEPS), n % STEPS, lane);
    multiply(d[n / EACH], low[n % EACH * 2], b.x, b.y);
    multiply(d[n / EACH], low[n % EACH * 2 + 1], b.z, b.w);
  }
  ring.give(SLOTS, lane);
}

// Adds the normed output of a block of the model, and reads for the next.
void add_to_stream(Shared& shared, Ring& ring, Stream& stream, const u32* tiles) {
  const int thread = this_thread();
  float4 d[TILES];
  collect_output(ring, d, tiles, thread / 32, thread % 32);
  float2 squares = {0, 0};
#pragma unroll
  for (int n = 0; n < TILES; n++)
    squares.x += d[n].x * d[n].x + d[n].y * d[n].y, squares.y += d[n].z * d[n].z + d[n].w * d[n].w;
  await_copies();
  const float2 inverse = inverse_roots(shared.squares[0], thread, squares);
#pragma unroll
  for (int n = 0; n < TILES; n++) {
    const float2 scale = scales_of(shared, 0, thread, n);
    u32(&x)[2] = stream.x[n];
    x[0] = pack(first(x[0]) + d[n].x * (inverse.x * scale.x), second(x[0]) + d[n].y * (inverse.x * scale.y));
    x[1] = pack(first(x[1]) + d[n].z * (inverse.y * scale.x), second(x[1]) + d[n].w * (inverse.y * scale.y));
  }
  read_stream(shared, stream, thread);
}

float4 summed(const float4 (&parts)[WARPS][32], int lane) {
  float4 sum = parts[0][lane];
#pragma unroll
  for (int w = 1; w < WARPS; w++) sum = sum + parts[w][lane];
  return sum;
}

// Adds up pairs of neighbouring tiles of columns, of what the stream is multiplied with.
template <int PAIRS>
void accumulate(Ring& ring, const Stream& stream, float4 (&sums)[2 * PAIRS], int lane) {
  constexpr int BATCH = 2 * PAIRS <= RING ? PAIRS : 2;
#pragma unroll
  for (int base = 0; base < PAIRS; base += BATCH) {
    ring.await_slots(BATCH, lane);
#pragma unroll
    for (int n = 0; n < STEPS; n++)
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const uint4 b = piece(ring.slot(i), n, lane);
        multiply(sums[2 * (base + i)], stream.h[n], b.x, b.y);
        multiply(sums[2 * (base + i) + 1], stream.h[n], b.z, b.w);
      }
    ring.give(BATCH, lane);
  }
}

// h A of one or two modules, a warp's inputs' part of it, as left operands.
template <int PARTS>
void multiply_low(Ring& ring, const Stream& stream, uint4 (&low)[PARTS * LOW / 2], int lane) {
  float4 sums[PARTS * LOW] = {};
  accumulate<PARTS * LOW / 2>(ring, stream, sums, lane);
#pragma unroll
  for (int n = 0; n < PARTS * LOW / 2; n++) {
    const uint2 left = pack(sums[2 * n]), right = pack(sums[2 * n + 1]);
    low[n] = make_uint4(left.x, left.y, right.x, right.y);
  }
}

// C sixteens of columns of h W + (h A) B, or of each of two matrices side by side, SUB at a time. `soon` is called a little
// before `emit`, which is given the index of a tile, its sums and the lane.
template <int PARTS, int C, int SUB, class Soon, class Emit>
void product(Shared& shared, Ring& ring, const Stream& stream, Soon soon, Emit emit) {
  const int thread = this_thread(), warp = thread / 32, lane = thread % 32;
  constexpr int NEW = SUB * 2;  // tiles of a part
  static_assert(NEW <= WARPS && C % SUB == 0 && PARTS * NEW <= STEPS, "tiles");
  uint4 low[PARTS * LOW / 2];
  multiply_low<PARTS>(ring, stream, low, lane);
  for (int s = 0; s < C / SUB; s++) {
    float4 sums[PARTS * NEW] = {};
    ring.await_slots(LOW / 4, lane);
#pragma unroll
    for (int k = 0; k < LOW / 4; k++)
#pragma unroll
      for (int n = 0; n < PARTS * NEW; n++) {
        const uint4 b = piece(ring.slot(k), n, lane), *a = low + n / NEW * (LOW / 2) + 2 * k;
        multiply(sums[n], a[0], b.x, b.y);
        multiply(sums[n], a[1], b.z, b.w);
      }
    ring.give(LOW / 4, lane);
    accumulate<PARTS * SUB>(ring, stream, sums, lane);
    if (s == C / SUB - 1) soon();
    if (s) synchronise();  // what lay there has been added up
#pragma unroll
    for (int n = 0; n < PARTS * NEW; n++) shared.sums()[n][warp][lane] = sums[n];
    synchronise();
    if (warp < NEW) {
      float4 y[PARTS];
#pragma unroll
      for (int part = 0; part < PARTS; part++) y[part] = summed(shared.sums()[part * NEW + warp], lane);
      emit(s * NEW + warp, y, lane);
    }
  }
}

// So many tiles of columns, of inputs that other blocks leave; INPUTS are those of a share of the sum.
template <int INPUTS, int COUNT, class Emit>
void tall_product(Shared& shared, Ring& ring, const u32* inputs, int tiles, int* counter, Emit emit) {
  const int thread = this_thread(), warp = thread / 32, lane = thread % 32;
  constexpr int PIECES = INPUTS / (32 * WARPS), EACH = fitting(PIECES), SLOTS = PIECES / EACH;
  static_assert(COUNT <= WARPS && PIECES * 32 * WARPS == INPUTS && SLOTS <= RING, "tiles");
  uint4 a[2 * PIECES];
  collect(a, [&](int n) { return inputs + ((warp * 2 * PIECES + n) * 32 + lane) * 4; });
  if (thread == 0) count(counter);
#pragma unroll
  for (int tile = 0; tile < COUNT; tile++) {
    if (tile >= tiles) break;
    float4 sum[2] = {};
    ring.await_slots(SLOTS, lane);
#pragma unroll
    for (int n = 0; n < PIECES; n++) {
      const uint4 b = piece(ring.slot(n / EACH), n % EACH, lane);
      multiply(sum[0], a[2 * n], b.x, b.y);
      multiply(sum[1], a[2 * n + 1], b.z, b.w);
    }
    ring.give(SLOTS, lane);
    shared.sums()[tile][warp][lane] = sum[0] + sum[1];
  }
  synchronise();
  if (warp < tiles) emit(warp, summed(shared.sums()[warp], lane), lane);
}
