// The residual stream, and products with what is read of it or left by other blocks.
//
// Left operands, sixteen rows, and sums are held as the matrix units have them: of a tile of eight columns a lane has rows
// lane / 4 and eight more, and of each the neighbouring columns 2 (lane % 4) and the next. A sum over inputs is cut over the
// warps, each of which has the same columns of the residual stream throughout.

#pragma once
#include "ring.cuh"

struct Stream {
  u32 x[TILES][2];  // the stream
  float2 squares;   // sums of this lane's
  uint4 h[STEPS];   // what a block of the model reads of it
};

// Where a tile is left that others will read as part of a left operand: two neighbours together.
int tile_at(int tile, int lane) { return (tile / 2 * 32 + lane) * 4 + tile % 2 * 2; }

// Of each of the four sums the total over a row's columns, by one barrier for all of them; .x and .y of the lane's two rows.
// Within four lanes that share rows, each sees to one of the sums.
void totals(float (&shared)[4][ROWS][WARPS], float2 (&sums)[4], int thread) {
  const int warp = thread / 32, row = thread % 32 / 4, t = thread % 4;
  auto halved = [&](float2 kept, float2 given, int apart) {
    return float2{kept.x + __shfl_xor_sync(~0u, given.x, apart), kept.y + __shfl_xor_sync(~0u, given.y, apart)};
  };
  const bool high = t & 2, odd = t & 1;
  const float2 even_one = halved(high ? sums[2] : sums[0], high ? sums[0] : sums[2], 2);
  const float2 odd_one = halved(high ? sums[3] : sums[1], high ? sums[1] : sums[3], 2);
  const float2 mine = halved(odd ? odd_one : even_one, odd ? even_one : odd_one, 1);
  shared[t][row][warp] = mine.x, shared[t][row + 8][warp] = mine.y;
  synchronise();
  float2 total = {0, 0};
#pragma unroll
  for (int w = 0; w < WARPS; w += 4) {
    const float4 a = *(const float4*)&shared[t][row][w], b = *(const float4*)&shared[t][row + 8][w];
    total.x += (a.x + a.y) + (a.z + a.w), total.y += (b.x + b.y) + (b.z + b.w);
  }
#pragma unroll
  for (int n = 0; n < 4; n++)
    sums[n] = {__shfl_sync(~0u, total.x, thread % 32 / 4 * 4 + n), __shfl_sync(~0u, total.y, thread % 32 / 4 * 4 + n)};
}
float inverse_root(float squares) { return rsqrtf(squares * (1.0f / WIDTH) + EPS); }

// Has a warp's scales of two norms brought: of that after a block of the model and that before the next.
void ask_for_scales(Shared& shared, const bf16* scales, int which) {
  const int thread = this_thread(), warp = thread / 32;
  __syncwarp();
  for (int n = thread % 32; n < 2 * SCALE_BYTES / 16; n += 32)
    copy_ahead(address(shared.scales[warp]) + n * 16, scales + (which * WARPS + warp) * SCALE_BYTES + n * 8);
}
// A tile's numbers times one and the scale.
float4 scaled(const Shared& shared, int which, int thread, int tile, float4 x) {
  const u32 pair = *(const u32*)(shared.scales[thread / 32] + which * SCALE_BYTES + tile * 16 + thread % 4 * 4);
  const float even = first(pair), odd = second(pair);
  return {x.x + x.x * even, x.y + x.y * odd, x.z + x.z * even, x.w + x.w * odd};
}

// What the next block of the model reads, of each tile after `renew` was called with it.
template <class Renew>
void read_stream(Shared& shared, Stream& stream, float2 inverse, int thread, Renew renew) {
  stream.squares = {0, 0};
  auto read_tile = [&](int n) {
    renew(n);
    const u32(&x)[2] = stream.x[n];
    const float4 y = {first(x[0]), second(x[0]), first(x[1]), second(x[1])};
    stream.squares.x += y.x * y.x + y.y * y.y, stream.squares.y += y.z * y.z + y.w * y.w;
    return pack(scaled(shared, 1, thread, n, {y.x * inverse.x, y.y * inverse.x, y.z * inverse.y, y.w * inverse.y}));
  };
#pragma unroll
  for (int n = 0; n < STEPS; n++) {
    const uint2 left = read_tile(2 * n), right = read_tile(2 * n + 1);
    stream.h[n] = make_uint4(left.x, left.y, right.x, right.y);
  }
}

// The first reading, of the tokens' embeddings.
void begin_stream(Shared& shared, Stream& stream, const bf16* embedding, const int* tokens, const bf16* scales) {
  ask_for_scales(shared, scales, 0);
  const int thread = this_thread(), warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const bf16* row = embedding + (size_t)tokens[half * 8 + g] * WIDTH + warp * TILES * 8 + t * 2;
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const u32 x = *(const u32*)(row + n * 8);
      stream.x[n][half] = pack(first(x) * EMBEDDED, second(x) * EMBEDDED);
    }
  }
  float2 sums[4] = {};
#pragma unroll
  for (int n = 0; n < TILES; n++) {
    const u32(&x)[2] = stream.x[n];
    sums[0].x += first(x[0]) * first(x[0]) + second(x[0]) * second(x[0]);
    sums[0].y += first(x[1]) * first(x[1]) + second(x[1]) * second(x[1]);
  }
  await_copies();
  __syncwarp();
  totals(shared.squares, sums, thread);
  read_stream(shared, stream, {inverse_root(sums[0].x), inverse_root(sums[0].y)}, thread, [](int) {});
}

// A warp's columns of the output of a block of the model: of its tiles, and of the last of them, which are h A, times B.
void collect_output(Ring& ring, float4 (&d)[TILES], const u32* tiles, int warp, int lane) {
  constexpr int EACH = LOW / 4, SLOTS = TILES * EACH / STEPS;  // pieces of B to a tile, slots that they take
  static_assert(SLOTS <= RING, "slots");
  uint4 pairs[STEPS + LOW / 2], *low = pairs + STEPS;
  collect(pairs, [&](int n) { return tiles + ((n < STEPS ? warp * STEPS + n : WIDTH / 16 + n - STEPS) * 32 + lane) * 4; });
#pragma unroll
  for (int n = 0; n < STEPS; n++) {
    d[2 * n] = {first(pairs[n].x), second(pairs[n].x), first(pairs[n].y), second(pairs[n].y)};
    d[2 * n + 1] = {first(pairs[n].z), second(pairs[n].z), first(pairs[n].w), second(pairs[n].w)};
  }
  ring.await_slots(SLOTS, lane);
#pragma unroll
  for (int n = 0; n < TILES * EACH; n++) {
    const uint4 b = ring.piece(n / STEPS, n % STEPS, lane);
    multiply(d[n / EACH], low[n % EACH * 2], b.x, b.y);
    multiply(d[n / EACH], low[n % EACH * 2 + 1], b.z, b.w);
  }
  ring.give(SLOTS, lane);
}

// Adds the normed output of a block of the model, and reads for the next. The mean square of the sum follows from sums that
// can be taken before it is known how far the output is scaled: |x + r d|^2 = |x|^2 + 2 r x d + r^2 |d|^2.
void add_to_stream(Shared& shared, Ring& ring, Stream& stream, const u32* tiles) {
  const int thread = this_thread();
  float4 d[TILES];
  collect_output(ring, d, tiles, thread / 32, thread % 32);
  float2 sums[4] = {{0, 0}, stream.squares, {0, 0}, {0, 0}};
  await_copies();
  __syncwarp();
#pragma unroll
  for (int n = 0; n < TILES; n++) {
    const u32(&x)[2] = stream.x[n];
    sums[0].x += d[n].x * d[n].x + d[n].y * d[n].y, sums[0].y += d[n].z * d[n].z + d[n].w * d[n].w;
    d[n] = scaled(shared, 0, thread, n, d[n]);
    sums[2].x += first(x[0]) * d[n].x + second(x[0]) * d[n].y, sums[2].y += first(x[1]) * d[n].z + second(x[1]) * d[n].w;
    sums[3].x += d[n].x * d[n].x + d[n].y * d[n].y, sums[3].y += d[n].z * d[n].z + d[n].w * d[n].w;
  }
  totals(shared.squares, sums, thread);
  const float2 r = {inverse_root(sums[0].x), inverse_root(sums[0].y)};
  const float2 inverse = {inverse_root(sums[1].x + r.x * (2 * sums[2].x + r.x * sums[3].x)),
                          inverse_root(sums[1].y + r.y * (2 * sums[2].y + r.y * sums[3].y))};
  read_stream(shared, stream, inverse, thread, [&](int n) {
    u32(&x)[2] = stream.x[n];
    x[0] = pack(first(x[0]) + d[n].x * r.x, second(x[0]) + d[n].y * r.x);
    x[1] = pack(first(x[1]) + d[n].z * r.y, second(x[1]) + d[n].w * r.y);
  });
}

float4 summed(const float4 (&parts)[WARPS][32], int lane) {
  float4 sum = parts[0][lane];
#pragma unroll
  for (int w = 1; w < WARPS; w++) sum = sum + parts[w][lane];
  return sum;
}

// Adds up two neighbouring tiles of columns of each part, of what the stream is multiplied with.
template <int PARTS>
void accumulate(Ring& ring, const Stream& stream, float4 (&sums)[2 * PARTS], int lane) {
  ring.await_slots(PARTS, lane);
#pragma unroll
  for (int n = 0; n < STEPS; n++)
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      const uint4 b = ring.piece(part, n, lane);
      multiply(sums[2 * part], stream.h[n], b.x, b.y);
      multiply(sums[2 * part + 1], stream.h[n], b.z, b.w);
    }
  ring.give(PARTS, lane);
}

template <int COUNT>
void share_sums(Shared& shared, const float4 (&sums)[COUNT], int from, int warp, int lane) {
#pragma unroll
  for (int n = 0; n < COUNT; n++) shared.sums()[from + n][warp][lane] = sums[n];
}

// Sixteen columns of h A, left for all blocks.
void low_product(Shared& shared, Ring& ring, const Stream& stream, u32* words, int unit) {
  const int thread = this_thread(), warp = thread / 32, lane = thread % 32;
  float4 sums[2] = {};
  accumulate<1>(ring, stream, sums, lane);
  share_sums(shared, sums, 0, warp, lane);
  synchronise();
  if (warp < 2) leave(words + tile_at(unit * 2 + warp, lane), pack(summed(shared.sums()[warp], lane)));
  synchronise();
}

// So many sixteens of columns of h W + (h A) B, or of each of two matrices side by side, SUB at a time; h A is among the
// words. `soon` is called a little before `emit`, which is given the index of a tile, its sums and the lane.
template <int PARTS, int SUB, class Soon, class Emit>
void product(Shared& shared, Ring& ring, const Stream& stream, int count, const u32* words, Soon soon, Emit emit) {
  const int thread = this_thread(), warp = thread / 32, lane = thread % 32;
  static_assert(SUB * 2 <= WARPS && PARTS * LOW / 4 <= STEPS, "tiles");
  uint4 low[PARTS * LOW / 2];
  for (int from = 0; from < count; from += SUB) {
    float4 sums[SUB][PARTS * 2] = {};
#pragma unroll
    for (int n = 0; n < SUB; n++)
      if (from + n < count) accumulate<PARTS>(ring, stream, sums[n], lane);
    if (from + SUB >= count) soon();
    if (from) synchronise();  // what lay there has been added up
#pragma unroll
    for (int n = 0; n < SUB; n++) share_sums(shared, sums[n], n * PARTS * 2, warp, lane);
    synchronise();
    if (warp >= 2 * min(SUB, count - from)) continue;
    float4 y[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; part++) y[part] = summed(shared.sums()[(warp / 2 * PARTS + part) * 2 + warp % 2], lane);
    if (from == 0) collect(low, [&](int n) { return words + (n * 32 + lane) * 4; });
    ring.await_slots(1, lane);
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
      for (int k = 0; k < LOW / 4; k++) {
        const uint4 b = ring.piece(0, part * (LOW / 4) + k, lane), *a = low + part * (LOW / 2) + 2 * k;
        multiply(y[part], a[0], b.x, b.y);
        multiply(y[part], a[1], b.z, b.w);
      }
    ring.give(1, lane);
    emit(from * 2 + warp, y, lane);
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
#pragma unroll 1
  for (int tile = 0; tile < tiles; tile++) {
    float4 sum[4] = {};
    ring.await_slots(SLOTS, lane);
#pragma unroll
    for (int n = 0; n < PIECES; n++) {
      const uint4 b = ring.piece(n / EACH, n % EACH, lane);
      multiply(sum[n % 2], a[2 * n], b.x, b.y);
      multiply(sum[2 + n % 2], a[2 * n + 1], b.z, b.w);
    }
    ring.give(SLOTS, lane);
    shared.sums()[tile][warp][lane] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
  synchronise();
  if (warp < tiles) emit(warp, summed(shared.sums()[warp], lane), lane);
}
