// A token of every sequence through all layers, in one kernel whose blocks stay on their multiprocessors.
//
// A layer is seven stages: query, key and value; attention; its output; norm; gate and up; down; norm. A block takes its
// units of each, tells the others by a counter when one is done, and begins the next stage when all units of the stage
// before are. While it waits, its weights, or the keys and values it will attend to, are on their way into registers.
//
// Sizes are macros: L layers, D width, F of the feed-forward block, H heads, K key/value heads, GROUP completions a prompt,
// PROMPTS, S slots of a prompt, SLOTS of a completion, WINDOW, GLOBALS a bit for each layer, SCALE of queries, EPS of norms,
// BLOCKS of the grid, SHARED_BYTES of a block, WIDEST inputs of a unit; and for each product _C, sixteens of columns that a
// unit takes, and DOWN_Z, shares that the sum of "down" is cut into. one_kernel.py says how weights and caches are laid out.

typedef unsigned short bf16;
typedef unsigned int u32;

constexpr int ROWS = 16, RANK = 32, N = 256, WARPS = 12, THREADS = 32 * WARPS;
constexpr int STAGES = 7, SHARES = BLOCKS / (ROWS * K) < 4 ? BLOCKS / (ROWS * K) : 4, PER_KV = H / K;
constexpr int KEYS = 16, OWN_TILES = (SLOTS + KEYS - 1) / KEYS, TILES = PROMPTS * S / KEYS + ROWS * OWN_TILES;  // of keys
constexpr int GROUPS = 3;  // of warps that each take every third of the tiles' values
constexpr float LOWEST = -1e30f;

// Read anew in every stage, lest all that follows from it be kept through all stages, for want of registers in memory.
__device__ int this_thread() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

struct alignas(16) Shared {
  union {
    unsigned char h[ROWS * (2 * WIDEST + 64)];
    float attended[GROUPS][N][PER_KV];
  };
  float sums[WARPS][16][16 + 2];
  bf16 q[PER_KV + 1][N + 32];
  float scores[PER_KV][WARPS * KEYS + 4], own_score[PER_KV];
  float most[PER_KV], sum[GROUPS][PER_KV];
  float value[N], rotary[4][N];
  float totals[2][WARPS];
};

__device__ float wide(bf16 x) { return __uint_as_float((u32)x << 16); }
__device__ float first(u32 pair) { return __uint_as_float(pair << 16); }
__device__ float second(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ bf16 narrow(float x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
__device__ u32 pack(float x, float y) { return (u32)narrow(y) << 16 | narrow(x); }
__device__ float rounded(float x) { return wide(narrow(x)); }

// Weights never change: such a load may be ahead of any wait.
__device__ uint4 constant(const uint4* p) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p)
               : "memory");
  return x;
}
// Has the second level of cache fetch what will be read.
__device__ void expect(const uint4* from, int bytes) {
  if (threadIdx.x == 0)
    for (int at = 0; at < bytes; at += 1 << 14)
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"((const char*)from + at),
                   "r"(min(1 << 14, bytes - at)));
}
template <class T>
__device__ T fresh(const T* p) {
  return __ldcg(p);
}  // what another block has written

__device__ void arrive(int* counter) { asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory"); }
__device__ void arrive_block(int* counter) {
  __syncthreads();
  if (threadIdx.x == 0) arrive(counter);
}
__device__ void await(const int* counter, int count) {
  if (threadIdx.x == 0) {
    int seen;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    while (seen < count);
  }
  __syncthreads();
}

__device__ float warp_sum(float x) {
  for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
  return x;
}
__device__ float block_sum(float (&totals)[WARPS], float x) {
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) totals[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (int w = 0; w < WARPS; w++) x += totals[w];
  return x;
}

__device__ void multiply(float (&sum)[4], const uint4& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

static_assert(sizeof(Shared) <= SHARED_BYTES, "shared memory");

struct Matrix {  // of one layer: W, A and B in the order in which lanes hold them
  const uint4 *w, *a, *b;
};

// Columns of h W + (h A) B, of one matrix or of two side by side: C sixteens of each, over `depth` inputs from `start` on.
template <int C, int PARTS, int DEPTH, int INPUTS, int OUTPUTS, class Ready, class Emit>
__device__ void product(Shared& shared, Matrix m, int column, int module, int start, int* counter, Ready ready, Emit emit) {
  const int thread = this_thread();
  constexpr int SIXTEENS = PARTS * (C + 2), SPLIT = WARPS / SIXTEENS, CHUNKS = DEPTH / 32, ALL = INPUTS / 32;
  constexpr int MOST = (CHUNKS + SPLIT - 1) / SPLIT, HELD = MOST < 10 ? MOST : 10;
  static_assert(SPLIT * SIXTEENS == WARPS, "tiles");
  const int warp = thread / 32, lane = thread % 32, tile = warp % SIXTEENS, group = warp / SIXTEENS;
  const int part = tile / (C + 2), sixteen = tile % (C + 2);
  const int begin = CHUNKS * group / SPLIT, count = CHUNKS * (group + 1) / SPLIT - begin;
  const uint4* from = sixteen < C ? m.w + (size_t)((part * (OUTPUTS / PARTS) + column) / 16 + sixteen) * ALL * 64
                                  : m.a + (size_t)((module + part) * 2 + sixteen - C) * ALL * 64;
  from += (start / 32 + begin) * 64 + lane;
  uint4 held[HELD][2];
#pragma unroll
  for (int n = 0; n < HELD; n++)
    for (int j = 0; j < 2; j++) held[n][j] = n < count ? constant(from + n * 64 + j * 32) : make_uint4(0, 0, 0, 0);
  uint4 b[PARTS][2] = {};
  if (warp < 2 * C)
    for (int part = 0; part < PARTS; part++)
      for (int j = 0; j < 2; j++)
        b[part][j] = constant(m.b + (size_t)((part * (OUTPUTS / PARTS) + column) / 16 + warp / 2) * 64 + j * 32 + lane);
  ready();

  float sum[2][2][4] = {};
  const unsigned char* h = shared.h + lane / 4 * (2 * DEPTH + 64) + lane % 4 * 16 + begin * 64;
  for (int base = 0; base < MOST; base += HELD) {
#pragma unroll
    for (int n = 0; n < HELD; n++) {
      if (base + n < count) {
        const uint4 upper = *(const uint4*)(h + (base + n) * 64),
                    lower = *(const uint4*)(h + (base + n) * 64 + 8 * (2 * DEPTH + 64));
        multiply(sum[0][0], held[n][0], upper.x, upper.y);
        multiply(sum[0][1], held[n][0], lower.x, lower.y);
        multiply(sum[1][0], held[n][1], upper.z, upper.w);
        multiply(sum[1][1], held[n][1], lower.z, lower.w);
      }
      if (HELD < MOST && base + HELD + n < count)
        held[n][0] = constant(from + (base + HELD + n) * 64), held[n][1] = constant(from + (base + HELD + n) * 64 + 32);
    }
  }
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      *(float2*)&shared.sums[warp][half * 8 + g][n * 8 + t * 2] =
          make_float2(sum[0][n][half * 2] + sum[1][n][half * 2], sum[0][n][half * 2 + 1] + sum[1][n][half * 2 + 1]);
  __syncthreads();
  if (warp >= 2 * C) return;
  // A warp for sixteen columns and eight rows: W h, and B times A h.
  const int eight = warp % 2 * 8;
  float y[PARTS][4];
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    auto total = [&](int row, int n) {
      float x = 0;
#pragma unroll
      for (int i = 0; i < SPLIT; i++) x += shared.sums[i * SIXTEENS + part * (C + 2) + row / 16][row % 16][eight + n];
      return x;
    };
    u32 low[4];
#pragma unroll
    for (int n = 0; n < 4; n++) low[n] = pack(total(C * 16 + t * 8 + n * 2, g), total(C * 16 + t * 8 + n * 2 + 1, g));
#pragma unroll
    for (int n = 0; n < 4; n++) y[part][n] = total(warp / 2 * 16 + n / 2 * 8 + g, t * 2 + n % 2);
    multiply(y[part], b[part][0], low[0], low[1]);
    multiply(y[part], b[part][1], low[2], low[3]);
  }
#pragma unroll
  for (int n = 0; n < 4; n++) {
    float of[PARTS];
    for (int part = 0; part < PARTS; part++) of[part] = y[part][n];
    emit(eight + t * 2 + n % 2, column + warp / 2 * 16 + n / 2 * 8 + g, of);
  }
  asm volatile("bar.sync 1, %0;" ::"n"(64 * C) : "memory");
  if (thread == 0) arrive(counter);
}

// Rows of 16-bit numbers from memory, side by side in shared memory.
template <int DEPTH>
__device__ void load_rows(Shared& shared, const bf16* from, int stride) {
  const int thread = this_thread();
  constexpr int EACH = (ROWS * DEPTH / 8 + THREADS - 1) / THREADS;
  uint4 x[EACH] = {};
  auto all = [&](auto&& body) {
#pragma unroll
    for (int n = 0; n < EACH; n++)
      if (const int i = n * THREADS + thread; (n + 1) * THREADS <= ROWS * DEPTH / 8 || i < ROWS * DEPTH / 8)
        body(x[n], i / (DEPTH / 8), i % (DEPTH / 8));
  };
  all([&](uint4& x, int row, int at) { x = fresh((const uint4*)(from + (size_t)row * stride) + at); });
  all([&](const uint4& x, int row, int at) { *(uint4*)(shared.h + row * (2 * DEPTH + 64) + at * 16) = x; });
  __syncthreads();
}

// The residual stream of a row after a block whose output is the sum of `delta`, and what the next block reads of it.
template <int SUMMANDS, class Ready>
__device__ void norm(Shared& shared, int row, const bf16* x_in, bf16* x_out, bf16* h, const float* delta, const float* post,
                     const float* pre, Ready ready) {
  const int thread = this_thread();
  constexpr int EACH = (D / 2 + THREADS - 1) / THREADS;
  float2 x[EACH] = {}, change[EACH] = {}, scales[2][EACH] = {};
  auto all = [&](auto&& body) {
#pragma unroll
    for (int n = 0; n < EACH; n++)
      if (const int i = n * THREADS + thread; i < D / 2) body(n, i);
  };
  all([&](int n, int i) { scales[0][n] = ((const float2*)post)[i], scales[1][n] = ((const float2*)pre)[i]; });
  ready();
  float squares = 0;
  all([&](int n, int i) {
    const u32 pair = fresh((const u32*)(x_in + row * D) + i);
    float2 parts[SUMMANDS];
#pragma unroll
    for (int z = 0; z < SUMMANDS; z++) parts[z] = fresh((const float2*)(delta + (size_t)(z * ROWS + row) * D) + i);
    float2 sum = parts[0];
#pragma unroll
    for (int z = 1; z < SUMMANDS; z++) sum.x += parts[z].x, sum.y += parts[z].y;
    x[n] = make_float2(first(pair), second(pair));
    change[n] = make_float2(rounded(sum.x), rounded(sum.y));
    squares += change[n].x * change[n].x + change[n].y * change[n].y;
  });
  const float inverse = rsqrtf(block_sum(shared.totals[0], squares) * (1.0f / D) + EPS);
  squares = 0;
  all([&](int n, int i) {
    x[n].x = rounded(x[n].x + rounded(change[n].x * inverse * (1 + scales[0][n].x)));
    x[n].y = rounded(x[n].y + rounded(change[n].y * inverse * (1 + scales[0][n].y)));
    squares += x[n].x * x[n].x + x[n].y * x[n].y;
    ((u32*)(x_out + row * D))[i] = pack(x[n].x, x[n].y);
  });
  const float again = rsqrtf(block_sum(shared.totals[1], squares) * (1.0f / D) + EPS);
  all([&](int n, int i) {
    ((u32*)(h + row * D))[i] = pack(x[n].x * again * (1 + scales[1][n].x), x[n].y * again * (1 + scales[1][n].y));
  });
}

__device__ void unpack(float (&x)[8], const uint4& packed) {
  const u32 pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int n = 0; n < 4; n++) x[2 * n] = first(pairs[n]), x[2 * n + 1] = second(pairs[n]);
}

// A head after norm and RoPE, by one warp; a lane has eight neighbouring numbers, its partner those half a head away.
__device__ void rotate(float (&x)[8], const float* scale, const float* cosines, const float* sines) {
  const int thread = this_thread();
  const int lane = thread % 32;
  float squares = 0;
#pragma unroll
  for (int n = 0; n < 8; n++) squares += x[n] * x[n];
  const float inverse = rsqrtf(warp_sum(squares) * (1.0f / N) + EPS);
#pragma unroll
  for (int n = 0; n < 8; n++) {
    const float mine = rounded(x[n] * inverse * (1 + scale[lane * 8 + n])), other = __shfl_xor_sync(~0u, mine, 16);
    x[n] = rounded(mine * cosines[lane * 8 + n] + other * sines[lane * 8 + n]);
  }
}

struct Attention {
  const bf16* qkv;
  const float *scales, *angles;  // of queries and keys; cosines and sines
  bf16 *keys, *values, *parts;   // keys and values of a tile in the order in which lanes hold them
  float* logs;
  int window, slot;
  const int* lengths;
};

template <class Ready>
__device__ void attend(Shared& shared, const Attention& a, int unit, Ready ready) {
  const int thread = this_thread();
  const int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int share = unit % SHARES, kv = unit / SHARES % K, row = unit / SHARES / K, prompt = min(row / GROUP, PROMPTS - 1);
  const int before = S + a.slot + 1 - a.window, seen = max(S - a.lengths[prompt], before), own_seen = max(0, before - S);
  const int prompt_tiles = max(0, S / KEYS - seen / KEYS),
            tiles = prompt_tiles + (a.slot + KEYS - 1) / KEYS - own_seen / KEYS;
  const int begin = tiles * share / SHARES, end = tiles * (share + 1) / SHARES;
  const bool newest = share == SHARES - 1;
  const size_t own = PROMPTS * (S / KEYS) + row * OWN_TILES;
  struct Tile {
    size_t at;
    int first, least, limit;  // its first key, and from which to before which are seen
  };
  auto tile = [&](int n) {
    const bool of_prompt = n < prompt_tiles;
    const int place = of_prompt ? seen / KEYS + n : own_seen / KEYS + n - prompt_tiles;
    const size_t at = (((of_prompt ? prompt * (S / KEYS) : own) + place) * K + kv) * (16 * 32) + lane;
    return Tile{at, place * KEYS, of_prompt ? seen : own_seen, n >= end ? 0 : of_prompt ? S : a.slot};
  };
  const int group = warp / 4, quarter = warp % 4;  // whose values a warp takes: four tiles, a quarter of the head
  uint4 k[16], v[4][4];
  auto load = [&](int base) {
    const uint4 *keys = (const uint4*)a.keys + tile(base + warp).at, none = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < 16; i++) k[i] = base + warp < end ? constant(keys + i * 32) : none;
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const int at = base + group * 4 + n;
      const uint4* values = (const uint4*)a.values + tile(at).at + quarter * 4 * 32;
#pragma unroll
      for (int i = 0; i < 4; i++) v[n][i] = at < end ? constant(values + i * 32) : none;
    }
  };
  for (int i = thread; i < 4 * N; i += THREADS)
    (&shared.rotary[0][0])[i] = i < 2 * N ? a.scales[i] : a.angles[row * 4 * N + i - 2 * N];
  load(begin);
  ready();
  const bf16* heads = a.qkv + (size_t)row * (H + 2 * K) * N + lane * 8;
  if (warp < PER_KV || (newest && warp == PER_KV)) {
    const bool query = warp < PER_KV;
    float x[8];
    unpack(x, fresh((const uint4*)(heads + (query ? kv * PER_KV + warp : H + kv) * N)));
    rotate(x, shared.rotary[query ? 0 : 1], shared.rotary[2], shared.rotary[3]);
    const float scale = query ? SCALE : 1;
    *(uint4*)&shared.q[warp][lane * 8] = make_uint4(pack(x[0] * scale, x[1] * scale), pack(x[2] * scale, x[3] * scale),
                                                    pack(x[4] * scale, x[5] * scale), pack(x[6] * scale, x[7] * scale));
  } else if (newest && warp == PER_KV + 1) {
    float x[8];
    unpack(x, fresh((const uint4*)(heads + (H + K + kv) * N)));
#pragma unroll
    for (int n = 0; n < 8; n++) shared.value[lane * 8 + n] = x[n];
  }
  __syncthreads();
  if (warp == WARPS - 1)  // the token's score with itself
#pragma unroll
    for (int h = 0; h < PER_KV; h++) {
      float x[8], y[8], score = 0;
      unpack(x, *(const uint4*)&shared.q[h][lane * 8]);
      unpack(y, *(const uint4*)&shared.q[PER_KV][lane * 8]);
#pragma unroll
      for (int n = 0; n < 8; n++) score += x[n] * y[n];
      score = warp_sum(score);
      if (lane == 0) shared.own_score[h] = newest ? score : 2 * LOWEST;
    }
  float most = LOWEST, total = 0, out[4][4] = {};
  for (int base = begin; base < max(end, begin + 1); base += WARPS) {
    if (base > begin) {
      __syncthreads();
      load(base);
    }
    float scores[2][4] = {};
#pragma unroll
    for (int chunk = 0; chunk < 8; chunk++) {
      const uint4 q = *(const uint4*)&shared.q[g % PER_KV][chunk * 32 + t * 8];
      multiply(scores[0], k[chunk * 2], q.x, q.y);
      multiply(scores[1], k[chunk * 2 + 1], q.z, q.w);
    }
    const Tile mine = tile(base + warp);
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const int key = n / 2 * 8 + g, h = t * 2 + n % 2;
      const bool visible = mine.first + key >= mine.least && mine.first + key < mine.limit;
      if (h < PER_KV) shared.scores[h][warp * KEYS + key] = visible ? scores[0][n] + scores[1][n] : 2 * LOWEST;
    }
    __syncthreads();
    const float* row_scores = &shared.scores[g % PER_KV][t * 4];
    float now = fmaxf(most, shared.own_score[g % PER_KV]), sum = 0;
#pragma unroll
    for (int n = 0; n < WARPS; n++) {
      const float4 score = *(const float4*)(row_scores + n * KEYS);
      now = fmaxf(now, fmaxf(fmaxf(score.x, score.y), fmaxf(score.z, score.w)));
    }
    for (int other = 1; other < 4; other *= 2) now = fmaxf(now, __shfl_xor_sync(~0u, now, other));
    const float fade = __expf(most - now),
                fades[2] = {__shfl_sync(~0u, fade, t * 8 % 32), __shfl_sync(~0u, fade, (t * 8 + 4) % 32)};
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int n = 0; n < 4; n++) out[i][n] *= fades[n % 2];
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const float4 score = *(const float4*)(row_scores + (group * 4 + n) * KEYS);
      const float p[4] = {__expf(score.x - now), __expf(score.y - now), __expf(score.z - now), __expf(score.w - now)};
      sum += p[0] + p[1] + p[2] + p[3];
      const u32 low = pack(p[0], p[1]), high = pack(p[2], p[3]);
#pragma unroll
      for (int i = 0; i < 4; i++) multiply(out[i], v[n][i], low, high);
    }
    for (int other = 1; other < 4; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
    most = now, total = total * fade + sum;
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int n = 0; n < 4; n++)
      if (t * 2 + n % 2 < PER_KV) shared.attended[group][(quarter * 4 + i) * 16 + n / 2 * 8 + g][t * 2 + n % 2] = out[i][n];
  if (t == 0 && g < PER_KV && quarter == 0) shared.most[g] = most, shared.sum[group][g] = total;
  if (newest && thread < N) {
    const int key = a.slot % KEYS, dim = thread;
    const size_t at = ((own + a.slot / KEYS) * K + kv) * (16 * 256);
    a.keys[at + dim / 4 % 2 * 256 + dim / 32 * 512 + (key % 8 * 4 + dim / 8 % 4) * 8 + dim / 2 % 2 * 4 + key / 8 * 2 +
           dim % 2] = shared.q[PER_KV][dim];
    a.values[at + dim / 16 * 256 + (dim % 8 * 4 + key / 4) * 8 + key / 2 % 2 * 4 + dim / 8 % 2 * 2 + key % 2] =
        narrow(shared.value[dim]);
  }
  __syncthreads();
  if (const int dim = thread; dim < N) {
#pragma unroll
    for (int h = 0; h < PER_KV; h++) {
      const float own_weight = newest ? __expf(shared.own_score[h] - shared.most[h]) : 0;
      float x = newest ? own_weight * shared.value[dim] : 0, sum = own_weight;
#pragma unroll
      for (int i = 0; i < GROUPS; i++) x += shared.attended[i][dim][h], sum += shared.sum[i][h];
      const size_t at = ((size_t)row * SHARES + share) * H + kv * PER_KV + h;
      a.parts[at * N + dim] = narrow(sum > 0 ? __fdividef(x, sum) : 0);
      if (dim == 0) a.logs[at] = sum > 0 ? shared.most[h] + __logf(sum) : LOWEST;
    }
  }
}

// One head of every row in shared memory, as the sum of its shares.
__device__ void load_attended(Shared& shared, const bf16* parts, const float* logs, int head) {
  const int thread = this_thread();
  constexpr int EACH = (ROWS * 32 + THREADS - 1) / THREADS;
  uint4 part[EACH][SHARES] = {};
  float log[EACH][SHARES] = {};
  const int lane = thread % 32;
#pragma unroll
  for (int n = 0; n < EACH; n++)
    if (const int row = thread / 32 + n * WARPS; row < ROWS)
#pragma unroll
      for (int z = 0; z < SHARES; z++) {
        const size_t at = ((size_t)row * SHARES + z) * H + head;
        part[n][z] = fresh((const uint4*)(parts + at * N) + lane), log[n][z] = fresh(logs + at);
      }
#pragma unroll
  for (int n = 0; n < EACH; n++)
    if (const int row = thread / 32 + n * WARPS; row < ROWS) {
      float most = LOWEST, sum = 0, out[8] = {};
#pragma unroll
      for (int z = 0; z < SHARES; z++) most = fmaxf(most, log[n][z]);
#pragma unroll
      for (int z = 0; z < SHARES; z++) sum += log[n][z] = __expf(log[n][z] - most);
      const float inverse = __fdividef(1.0f, sum);
#pragma unroll
      for (int z = 0; z < SHARES; z++) {
        float x[8];
        unpack(x, part[n][z]);
#pragma unroll
        for (int d = 0; d < 8; d++) out[d] += log[n][z] * inverse * x[d];
      }
      *(uint4*)(shared.h + row * (2 * N + 64) + lane * 16) =
          make_uint4(pack(out[0], out[1]), pack(out[2], out[3]), pack(out[4], out[5]), pack(out[6], out[7]));
    }
  __syncthreads();
}

template <class Body>
__device__ void units(int count, int offset, Body body) {
  for (int unit = (blockIdx.x + BLOCKS - offset) % BLOCKS; unit < count; unit += BLOCKS) {
    body(unit);
  }
}

constexpr int QKV = (H + 2 * K) * N;
__device__ constexpr int COUNTS[STAGES] = {
    QKV / (16 * QKV_C), ROWS * K * SHARES, D / (16 * OUT_C) * H, ROWS, F / (16 * GATED_C), D / (16 * DOWN_C) * DOWN_Z, ROWS};
constexpr int LAST = BLOCKS - ROWS, FROM_QKV = COUNTS[0] < LAST ? LAST - COUNTS[0] : 0;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    token(const bf16* x_in, const bf16* h_in, const int* slot_in, const int* lengths, const float* angles,
          const float* norms, const float* head_norms, const uint4* qkv_w, const uint4* qkv_a, const uint4* qkv_b,
          const uint4* out_w, const uint4* out_a, const uint4* out_b, const uint4* gated_w, const uint4* gated_a,
          const uint4* gated_b, const uint4* down_w, const uint4* down_a, const uint4* down_b, const bf16*, const bf16*,
          const int*, bf16* keys, bf16* values, int* counters, bf16* h, bf16* x, bf16* qkv, bf16* parts, float* logs,
          float* delta, bf16* act) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *(Shared*)memory;
  const int slot = *slot_in;
  for (int layer = 0; layer < L; layer++) {
    int* counter = counters + layer * STAGES;
    auto after = [&](int stage) {  // waits for all units of a stage of this layer, or the last of the layer before
      return [=] { await(stage < 0 ? counter - 1 : counter + stage, COUNTS[stage < 0 ? STAGES - 1 : stage] * (slot + 1)); };
    };
    auto matrix = [&](const uint4* w, const uint4* a, const uint4* b, int inputs, int outputs, int modules) {
      return Matrix{w + (size_t)layer * inputs * outputs / 8, a + (size_t)layer * modules * inputs * RANK / 8,
                    b + (size_t)layer * outputs * RANK / 8};
    };
    const float* scales = norms + (size_t)layer * 4 * D;
    units(COUNTS[0], FROM_QKV, [&](int unit) {
      const int column = unit * 16 * QKV_C, module = (column >= H * N) + (column >= (H + K) * N);
      product<QKV_C, 1, D, D, QKV>(
          shared, matrix(qkv_w, qkv_a, qkv_b, D, QKV, 3), column, module, 0, counter,
          [&] {
            if (layer) after(-1)();
            load_rows<D>(shared, layer ? h : h_in, D);
          },
          [&](int n, int at, float (&y)[1]) { qkv[n * QKV + at] = narrow(y[0]); });
    });
    for (int unit = blockIdx.x; unit < COUNTS[4]; unit += BLOCKS)
      for (int part = 0; part < 2; part++)
        expect(gated_w + ((size_t)layer * 2 * F + part * F + unit * 16 * GATED_C) * (D / 8), 16 * GATED_C * D * 2);
    units(COUNTS[1], 0, [&](int unit) {
      const bool global = GLOBALS >> layer & 1;
      const size_t cache = (size_t)layer * TILES * K * (KEYS * N);
      attend(shared,
             Attention{qkv, head_norms + layer * 2 * N, angles + (global ? 2 * N : 0), keys + cache, values + cache, parts,
                       logs, global ? 1 << 30 : WINDOW, slot, lengths},
             unit, after(0));
      arrive_block(counter + 1);
    });
    units(COUNTS[2], 0, [&](int unit) {
      const int head = unit % H, column = unit / H * 16 * OUT_C;
      product<OUT_C, 1, N, H * N, D>(
          shared, matrix(out_w, out_a, out_b, H * N, D, 1), column, 0, head * N, counter + 2,
          [&] {
            after(1)();
            load_attended(shared, parts, logs, head);
          },
          [&](int n, int at, float (&y)[1]) { delta[(size_t)(head * ROWS + n) * D + at] = y[0]; });
    });
    units(ROWS, LAST, [&](int row) {
      norm<H>(shared, row, layer ? x : x_in, x, h, delta, scales, scales + D, after(2));
      arrive_block(counter + 3);
    });
    for (int unit = blockIdx.x; unit < COUNTS[5]; unit += BLOCKS)
      for (int n = 0; n < DOWN_C; n++)
        expect(down_w + ((size_t)layer * D + (unit / DOWN_Z * DOWN_C + n) * 16) * (F / 8) + unit % DOWN_Z * (F / DOWN_Z) * 2,
               16 * 2 * F / DOWN_Z);
    units(COUNTS[4], 0, [&](int unit) {
      product<GATED_C, 2, D, D, 2 * F>(
          shared, matrix(gated_w, gated_a, gated_b, D, 2 * F, 2), unit * 16 * GATED_C, 0, 0, counter + 4,
          [&] {
            after(3)();
            load_rows<D>(shared, h, D);
          },
          [&](int n, int at, float (&y)[2]) {
            const float gate = y[0], inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
            act[n * F + at] = narrow(0.5f * gate * (1 + tanhf(inner)) * y[1]);
          });
    });
    units(COUNTS[5], 0, [&](int unit) {
      const int share = unit % DOWN_Z, column = unit / DOWN_Z * 16 * DOWN_C;
      product<DOWN_C, 1, F / DOWN_Z, F, D>(
          shared, matrix(down_w, down_a, down_b, F, D, 1), column, 0, share * (F / DOWN_Z), counter + 5,
          [&] {
            after(4)();
            load_rows<F / DOWN_Z>(shared, act + share * (F / DOWN_Z), F);
          },
          [&](int n, int at, float (&y)[1]) { delta[(size_t)(share * ROWS + n) * D + at] = y[0]; });
    });
    units(ROWS, LAST, [&](int row) {
      norm<DOWN_Z>(shared, row, x, x, h, delta, scales + 2 * D, scales + 3 * D, after(5));
      arrive_block(counter + 6);
    });
  }
}
