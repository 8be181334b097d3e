// A token of every sequence through all layers, in one kernel whose blocks stay on their multiprocessors.
//
// Blocks work in teams, each on sixteen sequences of one policy. A layer is five stages: query, key and value; attention; its
// output; gate and up; down. A block takes its units of each stage and begins when the words it needs of the stage before are
// there. A word that is not there yet has all bits set, as no number has; so nothing need be waited for but the words
// themselves. Every other token has the same set of them, and each clears that of the next. Counters say when it is worth
// while to look. All blocks must be running at once: there may be no more of them than multiprocessors.
//
// Every block holds the residual stream of its team and norms it by itself. Weights, and keys and values of the tokens
// before, depend on no one: feeders, warps of their own, have them copied into shared memory, stages ahead of their use, for
// each of the other warps in the order in which it will ask for them.

#include "attention.cuh"

struct Given {
  const bf16* x;
  const int *slot, *lengths;
  const float *angles, *scales, *head_norms;
  const uint4 *qkv_w, *qkv_a, *qkv_b, *out_w, *out_a, *out_b, *gated_w, *gated_a, *gated_b, *down_w, *down_a, *down_b;
  bf16 *keys, *values;
  int* counters;
  u32* words;
  bf16* h;
};

// Which block this is, and where it has come to.
struct Place {
  int team, policy, member, slot, layer;

  explicit Place(int slot)
      : team(blockIdx.x / BLOCKS), policy(team / TEAMS_EACH), member(blockIdx.x % BLOCKS), slot(slot), layer(0) {}
  bool global() const { return GLOBALS >> layer & 1; }
  int window() const { return global() ? 1 << 30 : WINDOW; }
  int round() const { return slot * LAYERS + layer + 1; }
  size_t words() const { return ((size_t)(slot % 2 * TEAMS + team) * LAYERS + layer) * WORDS; }
  size_t cache() const { return (size_t)layer * CACHE_TILES * KV_HEADS * KEYS * HEAD; }
  size_t of_policy() const { return (size_t)layer * POLICIES + policy; }
  int* counter(const Given& given, Counter which) const { return given.counters + (team * COUNTERS + which) * APART; }
};

// Sends one warp all that it will take, in its order. Pointers to fragments count sixteen bytes.
struct Feeder {
  Ring ring;
  const Given& given;
  Place here;
  const int warp;
  static constexpr int WHOLE = STEPS * 32, WIDE = WARPS * WHOLE;  // of sixteen columns: a warp's inputs, all inputs

  // The words of a layer, and it may be long since they were cleared: this has the second level of cache fetch a part of them.
  void expect_words(int layer) const {
    constexpr int EACH = parts_of(WORDS, BLOCKS * 4) * 4;
    const int from = here.member * EACH, bytes = (min(from + EACH, WORDS) - from) * 4;
    const u32* at = given.words + here.words() + (layer - here.layer) * WORDS + from;
    if (warp == 0 && layer < LAYERS && bytes > 0) fetch(at, bytes);
  }
  void columns_of_b(const uint4* b, size_t of_policy) {
    ring.put_pieces(b + (of_policy * (WIDTH / 8) + warp * TILES) * (LOW / 4) * 32, TILES * (LOW / 4), STEPS);
  }
  void tall_tile(const uint4* w, const uint4* a, int tile, int share, int shares, int pieces) {
    const int all = pieces * WARPS * 32, of_w = WIDTH / 8;
    const uint4* from = tile < of_w ? w + (((size_t)here.layer * shares + share) * of_w + tile) * all
                                    : a + ((here.of_policy() * shares + share) * LOW + tile - of_w) * all;
    ring.put_pieces(from + warp * pieces * 32, pieces, fitting(pieces));
  }

  void query_key_value(int unit) {
    const int column = unit * 16 * QKV_C, module = (column >= HEADS * HEAD) + (column >= (HEADS + KV_HEADS) * HEAD);
    for (int n = 0; n < LOW / 2; n++)
      ring.put(given.qkv_a + ((here.of_policy() * 3 + module) * (LOW / 2) + n) * WIDE + warp * WHOLE, SLOT);
    for (int from = unit * QKV_C; from < (unit + 1) * QKV_C; from += QKV_SUB) {
      for (int k = 0; k < LOW / 4; k++)
        ring.put(given.qkv_b + ((here.of_policy() * (LOW / 4) + k) * (QKV / 8) + from * 2) * 32, QKV_SUB * 2 * PIECE);
      for (int n = from; n < from + QKV_SUB; n++)
        ring.put(given.qkv_w + ((size_t)here.layer * (QKV / 16) + n) * WIDE + warp * WHOLE, SLOT);
    }
  }
  void attention(int unit) {
    const Span span(given.lengths, here.team, unit, here.slot, here.window());
    const uint4 *keys = (const uint4*)(given.keys + here.cache()), *values = (const uint4*)(given.values + here.cache());
    for (int base = span.begin; base < span.end; base += WARPS) {
      if (base + warp < span.end) ring.put_pieces(keys + span.at(base + warp), HEAD / 16, KEY_PIECES);
      for (int from = base; from < min(base + WARPS, span.end); from += VALUE_TILES) {
        constexpr int BYTES = BLOCKS_OF_HEAD * PIECE;
        const int count = min(VALUE_TILES, span.end - from);
        ring.expect(count * BYTES);
        for (int n = 0; n < count; n++)
          ring.copy(n * BYTES, values + span.at(from + n) + warp * BLOCKS_OF_HEAD * 32, BYTES);
        ring.advance(1);
      }
    }
  }
  void output(int unit) {
    for (int n = unit * OUT_N; n < min((unit + 1) * OUT_N, OUT_TILES); n++)
      tall_tile(given.out_w, given.out_a, n, 0, 1, HEADS * HEAD / (32 * WARPS));
  }
  void gate_and_up(int unit) {
    for (int n = 0; n < LOW; n++) ring.put(given.gated_a + (here.of_policy() * LOW + n) * WIDE + warp * WHOLE, SLOT);
    for (int from = unit * GATED_C; from < (unit + 1) * GATED_C; from += GATED_SUB) {
      constexpr int BYTES = GATED_SUB * 2 * PIECE;
      for (int k = 0; k < LOW / 4; k++) {
        const uint4* b = given.gated_b + ((here.of_policy() * (LOW / 4) + k) * (HIDDEN / 4) + from * 2) * 32;
        ring.expect(2 * BYTES);
        ring.copy(0, b, BYTES), ring.copy(BYTES, b + HIDDEN / 8 * 32, BYTES);
        ring.advance(1);
      }
      for (int part = 0; part < 2; part++)
        for (int n = from; n < from + GATED_SUB; n++)
          ring.put(given.gated_w + ((size_t)(here.layer * 2 + part) * (HIDDEN / 16) + n) * WIDE + warp * WHOLE, SLOT);
    }
  }
  void down(int unit) {
    for (int n = unit / DOWN_Z * DOWN_N; n < min((unit / DOWN_Z + 1) * DOWN_N, OUT_TILES); n++)
      tall_tile(given.down_w, given.down_a, n, unit % DOWN_Z, DOWN_Z, HIDDEN / DOWN_Z / (32 * WARPS));
  }

  void feed() {
    expect_words(0);
    for (; here.layer < LAYERS; here.layer++) {
      expect_words(here.layer + 1);
      if (here.layer) columns_of_b(given.down_b, here.of_policy() - POLICIES);
      for (int unit = here.member; unit < QKV_UNITS; unit += BLOCKS) query_key_value(unit);
      for (int unit = here.member; unit < HEAD_UNITS; unit += BLOCKS) attention(unit);
      for (int unit = here.member; unit < OUT_UNITS; unit += BLOCKS) output(unit);
      columns_of_b(given.out_b, here.of_policy());
      for (int unit = here.member; unit < GATED_UNITS; unit += BLOCKS) gate_and_up(unit);
      for (int unit = here.member; unit < DOWN_UNITS; unit += BLOCKS) down(unit);
    }
    if (here.member == 0) columns_of_b(given.down_b, here.of_policy() - POLICIES);
  }
};

void query_key_value(Shared& shared, Ring& ring, const Stream& stream, const Place& here, u32* words) {
  for (int unit = here.member; unit < QKV_UNITS; unit += BLOCKS) {
    product<1, QKV_C, QKV_SUB>(shared, ring, stream, [] {}, [&](int tile, float4(&y)[1], int lane) {
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
  const int row = here.team * ROWS + unit / SHARES / KV_HEADS;
  ask_for_rotary(shared, given.head_norms + here.layer * 2 * HEAD, given.angles + (row * 4 + here.global() * 2) * HEAD);
}

void attention(Shared& shared, Ring& ring, const Given& given, const Place& here, u32* words) {
  for (int unit = here.member; unit < HEAD_UNITS; unit += BLOCKS) {
    const Span span(given.lengths, here.team, unit, here.slot, here.window());
    attend(shared, ring, words, span, given.keys + here.cache(), given.values + here.cache());
    ask_for_rotary(shared, given, here, unit + BLOCKS);
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

float gated(float gate, float up) {
  const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
  return 0.5f * gate * (1 + tanhf(inner)) * up;
}

void gate_and_up(Shared& shared, Ring& ring, const Stream& stream, const Given& given, const Place& here, u32* words) {
  for (int unit = here.member; unit < GATED_UNITS; unit += BLOCKS) {
    auto soon = [&] {
      if (threadIdx.x == 0) count(here.counter(given, GATED));
    };
    product<2, GATED_C, GATED_SUB>(shared, ring, stream, soon, [&](int tile, float4(&y)[2], int lane) {
      const float4 x = {gated(y[0].x, y[1].x), gated(y[0].y, y[1].y), gated(y[0].z, y[1].z), gated(y[0].w, y[1].w)};
      leave(words + GATED_AT + tile_at(unit * GATED_C * 2 + tile, lane), pack(x));
    });
    synchronise();
  }
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

void clear_words(const Given& given, int slot) {
  constexpr int ALL = TEAMS * LAYERS * (WORDS / 4);
  uint4* next = (uint4*)given.words + (size_t)((slot + 1) % 2) * ALL;
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

void read_token(Shared& shared, Ring ring, const Given& given, int slot) {
  Place here(slot);
  Stream stream;
  begin_stream(shared, stream, given.x + (size_t)here.team * ROWS * WIDTH, given.scales);
  clear_words(given, slot);
  for (; here.layer < LAYERS; here.layer++) {
    u32* words = given.words + here.words();
    if (here.layer) {
      await(here.counter(given, DOWN), (here.round() - 1) * DOWN_UNITS);
      add_to_stream(shared, ring, stream, words - WORDS + DOWN_AT);
    }
    ask_for_scales(shared, given.scales, 2 * here.layer + 1);
    ask_for_rotary(shared, given, here, here.member);
    query_key_value(shared, ring, stream, here, words);
    attention(shared, ring, given, here, words);
    output(shared, ring, given, here, words);
    await(here.counter(given, PUT_OUT), here.round() * OUT_UNITS);
    add_to_stream(shared, ring, stream, words + OUT_AT);
    ask_for_scales(shared, given.scales, 2 * here.layer + 2);
    gate_and_up(shared, ring, stream, given, here, words);
    down(shared, ring, given, here, words);
  }
  if (here.member) return;
  await(here.counter(given, DOWN), (here.round() - 1) * DOWN_UNITS);
  add_to_stream(shared, ring, stream, given.words + here.words() - WORDS + DOWN_AT);
  leave_hidden(stream, given.h + (size_t)here.team * ROWS * WIDTH);
}

extern "C" __global__ void __launch_bounds__(THREADS + 32 * FEEDERS, 1)
    token(const bf16* x, const int* slot, const int* lengths, const float* angles, const float* scales,
          const float* head_norms, const uint4* qkv_w, const uint4* qkv_a, const uint4* qkv_b, const uint4* out_w,
          const uint4* out_a, const uint4* out_b, const uint4* gated_w, const uint4* gated_a, const uint4* gated_b,
          const uint4* down_w, const uint4* down_a, const uint4* down_b, const bf16*, const bf16*, const int*, const u32*,
          bf16* keys, bf16* values, int* counters, u32* words, bf16* h) {
  SHARED_MEMORY(memory);
  static_assert(sizeof(Shared) <= SHARED_BYTES, "shared memory");
  Shared& shared = *(Shared*)memory;
  const Given given = {x,      slot,    lengths, angles,  scales,  head_norms, qkv_w,  qkv_a,  qkv_b,    out_w, out_a, out_b,
                       gated_w, gated_a, gated_b, down_w, down_a, down_b,     keys,   values, counters, words, h};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x < WARPS * RING) {
    make_barrier(address(&shared.full[0][0] + threadIdx.x));
    make_barrier(address(&shared.empty[0][0] + threadIdx.x));
  }
  barriers_are_made();
  __syncthreads();
  if (warp >= WARPS) {
    leave_registers<40>();
    const int of = lane * FEEDERS + warp - WARPS;
    if (of < WARPS) Feeder{Ring(shared, of), given, Place(*slot), of}.feed();
  } else {
    take_registers<232>();
    read_token(shared, Ring(shared, warp), given, *slot);
  }
}
