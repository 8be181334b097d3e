// A token of every sequence through all layers, in one kernel whose blocks stay on their multiprocessors.
//
// Blocks work in teams, each on sixteen sequences of one policy. A layer is five stages: query, key and value; attention; its
// output; gate and up; down. A block takes its units of each stage and begins when the words it needs of the stage before are
// there. A word that is not there yet has all bits set, as no number has; so nothing need be waited for but the words
// themselves. Every other token has the same set of them, and each clears that of the next. Counters say when it is worth
// while to look. All blocks must be running at once: there may be no more of them than multiprocessors.
//
// Every block holds the residual stream of its team and norms it by itself. What it reads of it, h, a few blocks that have the
// least to do multiply by A, for all, while the others multiply by W. Weights, and keys and values of the tokens before, depend
// on no one: feeders, a warp for each of the others, have them copied into shared memory, stages ahead of their use, in the
// order in which they will be asked for.
//
// Instructions are counted too. Layers are passed through one after another, so a loop body that the cache of instructions
// does not hold is fetched anew in every layer, from wherever weights that pass by have left it; hence the loops that are not
// unrolled, and one loop over the blocks of the model, attention and feed-forward in turn, rather than over layers.

#include "feeder.cuh"

void query_key_value(Shared& shared, Ring& ring, const Stream& stream, const Place& here, u32* words) {
  for (int unit = here.member; unit < QKV_UNITS; unit += BLOCKS) {
    const int column = unit * 16 * QKV_C, module = (column >= HEADS * HEAD) + (column >= (HEADS + KV_HEADS) * HEAD);
    const u32* low = words + QKV_LOW_AT + module * LOW * 64;
    product<1, QKV_SUB>(shared, ring, stream, QKV_C, low, [] {}, [&](int tile, float4(&y)[1], int lane) {
      u32* at = words + QKV_AT + (unit * QKV_C * 2 + tile) * 4 + lane % 4;
      leave(at + lane / 4 * (QKV / 2), pack(y[0].x, y[0].y));
      leave(at + (lane / 4 + 8) * (QKV / 2), pack(y[0].z, y[0].w));
    });
    synchronise();
  }
}

// Has what turns the queries of a unit brought, if there is such a unit.
void ask_for_rotary(Shared& shared, const Given& given, const Place& here, int unit) {
  if (unit >= HEAD_UNITS) return;
  const int place = given.lengths[prompt_of(here.team, unit / SHARES / KV_HEADS)] + here.slot;
  const float* angles = given.angles + (place * 4 + here.global() * 2) * HEAD;
  ask_for_rotary(shared, given.head_norms + here.layer * 2 * HEAD, angles);
}

void attention(Shared& shared, Ring& ring, const Given& given, const Place& here, u32* words) {
  for (int unit = here.member; unit < HEAD_UNITS; unit += BLOCKS) {
    const Span span(given.lengths, here.team, unit, here.slot, here.window());
    attend(shared, ring, words, span, given.keys + here.cache(), given.values + here.cache());
    if (HEAD_UNITS > BLOCKS) ask_for_rotary(shared, given, here, unit + BLOCKS);
    if (threadIdx.x == 0) count(here.counter(given, ATTENDED));
    if (SHARES > 1) combine(words, span);
    synchronise();
  }
}

void output(Shared& shared, Ring& ring, const Given& given, const Place& here, u32* words) {
  if (here.member >= OUT_UNITS) return;
  await(here.counter(given, ATTENDED), here.round() * HEAD_UNITS);
  for (int unit = here.member; unit < OUT_UNITS; unit += BLOCKS) {
    tall_product<HEADS * HEAD, OUT_N>(
        shared, ring, words + ATTENDED_AT, min(OUT_N, OUT_TILES - unit * OUT_N), here.counter(given, PUT_OUT),
        [&](int tile, float4 y, int lane) { leave(words + OUT_AT + tile_at(unit * OUT_N + tile, lane), pack(y)); });
    synchronise();
  }
}

// The gate's approximate gelu, times up: (1 + tanh x) / 2 = 1 / (1 + exp(-2 x)).
float gated(float gate, float up) {
  const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
  return __fdividef(gate * up, 1 + __expf(-2 * inner));
}

void gate_and_up(Shared& shared, Ring& ring, const Stream& stream, const Given& given, const Place& here, u32* words) {
  if (here.member >= GATED_UNITS) return;
  const int begin = gated_begin(here.member), sixteens = gated_begin(here.member + 1) - begin;
  auto soon = [&] {
    if (threadIdx.x == 0) count(here.counter(given, GATED));
  };
  product<2, GATED_SUB>(shared, ring, stream, sixteens, words + GATED_LOW_AT, soon, [&](int tile, float4(&y)[2], int lane) {
    const float4 x = {gated(y[0].x, y[1].x), gated(y[0].y, y[1].y), gated(y[0].z, y[1].z), gated(y[0].w, y[1].w)};
    leave(words + GATED_AT + tile_at(begin * 2 + tile, lane), pack(x));
  });
  synchronise();
}

// Each of the shares of a sum adds up some of its tiles. Whether this one does this one, and then all of its sum.
bool add_shares(u32* words, int tile, int share, int lane, float4& y) {
  u32* at = words + SHARES_AT + (tile * DOWN_Z * 32 + lane) * 4;
  if (tile % DOWN_Z != share) {
    leave(at + share * 128, y);
    return false;
  }
  uint4 others[DOWN_Z];
  collect(others, [&](int n) { return at + (n == share ? (share + 1) % DOWN_Z : n) * 128; });
#pragma unroll
  for (int n = 0; n < DOWN_Z; n++) {
    const uint4 x = others[n];
    if (n != share) y = y + float4{__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)};
  }
  return true;
}

void down(Shared& shared, Ring& ring, const Given& given, const Place& here, u32* words) {
  if (here.member >= DOWN_UNITS) return;
  await(here.counter(given, GATED), here.round() * GATED_UNITS);
  for (int unit = here.member; unit < DOWN_UNITS; unit += BLOCKS) {
    const int share = unit % DOWN_Z, from = unit / DOWN_Z * DOWN_N;
    const u32* inputs = words + GATED_AT + share * (HIDDEN / DOWN_Z / 16) * 128;
    tall_product<HIDDEN / DOWN_Z, DOWN_N>(shared, ring, inputs, min(DOWN_N, OUT_TILES - from), here.counter(given, DOWN),
                                          [&](int n, float4 y, int lane) {
                                            if (DOWN_Z == 1 || add_shares(words, from + n, share, lane, y))
                                              leave(words + DOWN_AT + tile_at(from + n, lane), pack(y));
                                          });
    synchronise();
  }
}

void clear_words(const Given& given, int before) {
  constexpr int ALL = TEAMS * LAYERS * (WORDS / 4);
  uint4* next = (uint4*)given.words + (size_t)((before + 1) % 2) * ALL;
  for (int n = blockIdx.x * THREADS + this_thread(); n < ALL; n += TEAMS * BLOCKS * THREADS)
    next[n] = make_uint4(MISSING, MISSING, MISSING, MISSING);
}

void leave_hidden(const Stream& stream, bf16* h) {
  const int thread = this_thread(), warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
#pragma unroll
  for (int n = 0; n < STEPS; n++) {
    const uint4 x = stream.h[n];
    u32 *upper = (u32*)(h + g * WIDTH) + (warp * STEPS + n) * 8 + t, *lower = upper + 4 * WIDTH;
    upper[0] = x.x, lower[0] = x.y, upper[4] = x.z, lower[4] = x.w;
  }
}

void read_token(Shared& shared, Ring ring, const Given& given) {
  Place here(given.slot);
  Stream stream;
  begin_stream(shared, stream, given.embedding, given.tokens + here.team * ROWS, given.scales);
  clear_words(given, here.before);
#pragma unroll 1
  for (int n = 0; n <= 2 * LAYERS; n++) {
    here.layer = n / 2;
    if (n == 2 * LAYERS && here.member) return;
    u32* words = given.words + here.words();
    if (n) {
      const int before = n % 2 ? here.round() * OUT_UNITS : (here.round() - 1) * DOWN_UNITS;
      await(here.counter(given, n % 2 ? PUT_OUT : DOWN), before);
      add_to_stream(shared, ring, stream, n % 2 ? words + OUT_AT : words - WORDS + DOWN_AT);
    }
    if (n == 2 * LAYERS) break;
    ask_for_scales(shared, given.scales, n + 1);
    for (int unit = here.low_unit(); unit < low_units(n); unit += BLOCKS)
      low_product(shared, ring, stream, words + (n % 2 ? GATED_LOW_AT : QKV_LOW_AT), unit);
    if (n % 2 == 0) {
      ask_for_rotary(shared, given, here, here.member);
      query_key_value(shared, ring, stream, here, words);
      attention(shared, ring, given, here, words);
      output(shared, ring, given, here, words);
    } else {
      gate_and_up(shared, ring, stream, given, here, words);
      down(shared, ring, given, here, words);
    }
  }
  leave_hidden(stream, given.h + (size_t)here.team * ROWS * WIDTH);
}

extern "C" __global__ void __launch_bounds__(2 * THREADS, 1)
    token(const bf16* embedding, const int* tokens, const int* slot, const int* lengths, const float* angles,
          const bf16* scales, const float* head_norms, const uint4* qkv_w, const uint4* qkv_a, const uint4* qkv_b,
          const uint4* out_w, const uint4* out_a, const uint4* out_b, const uint4* gated_w, const uint4* gated_a,
          const uint4* gated_b, const uint4* down_w, const uint4* down_a, const uint4* down_b, const bf16*, const bf16*,
          const int*, const u32*, bf16* keys, bf16* values, int* counters, u32* words, bf16* h) {
  SHARED_MEMORY(memory);
  static_assert(sizeof(Shared) <= SHARED_BYTES, "shared memory");
  Shared& shared = *(Shared*)memory;
  const Given given = {embedding, tokens, slot, lengths, angles, scales, head_norms, qkv_w, qkv_a, qkv_b, out_w, out_a, out_b,
                       gated_w, gated_a, gated_b, down_w, down_a, down_b, keys, values, counters, words, h};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x < WARPS * RING) {
    make_barrier(address(&shared.full[0][0] + threadIdx.x));
    make_barrier(address(&shared.empty[0][0] + threadIdx.x));
  }
  barriers_are_made();
  __syncthreads();
  if (warp >= WARPS) {
    leave_registers<32>();
    if (lane == 0) Feeder{Ring(shared, warp - WARPS, 0), given, Place(slot), warp - WARPS}.feed();
  } else {
    take_registers<224>();
    read_token(shared, Ring(shared, warp, *slot < 0), given);
  }
}
