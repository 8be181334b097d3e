// What the kernel is given, and the warps that have it sent to the others.

#pragma once
#include "attention.cuh"

struct Given {
  const bf16* embedding;
  const int *tokens, *slot, *lengths;
  const float* angles;
  const bf16* scales;
  const float* head_norms;
  const uint4 *qkv_w, *qkv_a, *qkv_b, *out_w, *out_a, *out_b, *gated_w, *gated_a, *gated_b, *down_w, *down_a, *down_b;
  bf16 *keys, *values;
  int* counters;
  u32* words;
  bf16* h;
};

// Which block this is, and where it has come to: the slot that it reads a token into, and how many tokens were read before
// with these counters and words.
struct Place {
  int team, policy, member, slot, before, layer;

  explicit Place(const int* slot)
      : team(blockIdx.x / BLOCKS),
        policy(team / TEAMS_EACH),
        member(blockIdx.x % BLOCKS),
        slot(slot[0]),
        before(slot[1]),
        layer(0) {}
  int low_unit() const { return BLOCKS - 1 - member; }  // the first of h A, by blocks that have the least of W
  bool global() const { return GLOBALS >> layer & 1; }
  int window() const { return global() ? 1 << 30 : WINDOW; }
  int round() const { return before * LAYERS + layer + 1; }
  size_t words() const { return ((size_t)(before % 2 * TEAMS + team) * LAYERS + layer) * WORDS; }
  size_t cache() const { return (size_t)layer * CACHE_TILES * KV_HEADS * KEYS * HEAD; }
  size_t of_policy() const { return (size_t)layer * POLICIES + policy; }
  int* counter(const Given& given, Counter which) const { return given.counters + (team * COUNTERS + which) * APART; }
};

// Of a block of the model, attention and feed-forward in turn: sixteens of columns of h A.
int low_units(int n) { return n % 2 ? LOW : 3 * LOW / 2; }

// Sends one warp all that it will take, in its order. Pointers to fragments count sixteen bytes.
struct Feeder {
  Ring ring;
  const Given& given;
  Place here;
  const int warp;
  static constexpr int WHOLE = STEPS * 32, WIDE = WARPS * WHOLE;  // of sixteen columns: a warp's inputs, all inputs
  // Where a ring holds little of gate and up, blocks that have all of theirs leave memory to those that have not.
  static constexpr bool SHORT = 4 * GATED_SUB > RING;

  // The words of a layer, and it may be long since they were cleared: this has the second level of cache fetch a part of them.
  void expect_words(int layer) const {
    constexpr int EACH = parts_of(WORDS, BLOCKS * 4) * 4;
    const int from = here.member * EACH, bytes = (min(from + EACH, WORDS) - from) * 4;
    const u32* at = given.words + here.words() + (layer - here.layer) * WORDS + from;
    if (warp == 0 && layer < LAYERS && bytes > 0) fetch(at, bytes);
  }
  void columns_of_b(const uint4* b, size_t of_policy) {
    ring.put_pieces(b + (of_policy * (WIDTH / 8) + warp * TILES) * (LOW / 4) * 32, TILES * (LOW / 4), STEPS, true);
  }
  void tall_tile(const uint4* w, const uint4* a, int tile, int share, int shares, int pieces) {
    const int all = pieces * WARPS * 32, of_w = WIDTH / 8;
    const uint4* from = tile < of_w ? w + (((size_t)here.layer * shares + share) * of_w + tile) * all
                                    : a + ((here.of_policy() * shares + share) * LOW + tile - of_w) * all;
    ring.put_pieces(from + warp * pieces * 32, pieces, fitting(pieces));
  }
  void low(const uint4* a, int units) {
    for (int n = here.low_unit(); n < units; n += BLOCKS)
      ring.put(a + (here.of_policy() * units + n) * WIDE + warp * WHOLE, SLOT);
  }
  void query_key_value(int unit) {
    for (int from = unit * QKV_C; from < (unit + 1) * QKV_C; from += QKV_SUB) {
      for (int n = from; n < from + QKV_SUB; n++)
        ring.put(given.qkv_w + ((size_t)here.layer * (QKV / 16) + n) * WIDE + warp * WHOLE, SLOT);
      if (warp < 2 * QKV_SUB) tiles_of_b(given.qkv_b, QKV / 8, from * 2 + warp, 1);
    }
  }
  // Of one tile of columns, and that of as many more matrices beside it.
  void tiles_of_b(const uint4* b, int tiles, int tile, int parts) {
    ring.expect(parts * (LOW / 4) * PIECE);
    for (int part = 0; part < parts; part++)
      for (int k = 0; k < LOW / 4; k++)
        ring.copy((part * (LOW / 4) + k) * PIECE,
                  b + (((here.of_policy() * (LOW / 4) + k) * parts + part) * tiles + tile) * 32, PIECE);
    ring.advance(1);
  }
  void attention(int unit) {
    const Span span(given.lengths, here.team, unit, here.slot, here.window());
    const uint4 *keys = (const uint4*)(given.keys + here.cache()), *values = (const uint4*)(given.values + here.cache());
    for (int tile = span.begin + warp; tile < span.end; tile += WARPS) {
      ring.put_pieces(keys + span.at(tile), HEAD / 16, KEY_PIECES);
      ring.put_pieces(values + span.at(tile), HEAD / 16, KEY_PIECES);
    }
  }
  void output(int unit) {
    for (int n = unit * OUT_N; n < min((unit + 1) * OUT_N, OUT_TILES); n++)
      tall_tile(given.out_w, given.out_a, n, 0, 1, HEADS * HEAD / (32 * WARPS));
  }
  void gate_and_up(int unit) {
    const int end = gated_begin(unit + 1);
    for (int from = gated_begin(unit); from < end; from += GATED_SUB) {
      const int count = min(GATED_SUB, end - from);
      for (int n = 0; n < 2 * count; n++)
        ring.put(given.gated_w + ((size_t)(here.layer * 2 + n % 2) * (HIDDEN / 16) + from + n / 2) * WIDE + warp * WHOLE, SLOT);
      if (warp < 2 * count) tiles_of_b(given.gated_b, HIDDEN / 8, from * 2 + warp, 2);
    }
  }
  void down(int unit) {
    for (int n = unit / DOWN_Z * DOWN_N; n < min((unit / DOWN_Z + 1) * DOWN_N, OUT_TILES); n++)
      tall_tile(given.down_w, given.down_a, n, unit % DOWN_Z, DOWN_Z, HIDDEN / DOWN_Z / (32 * WARPS));
  }

  void feed() {
    expect_words(0);
#pragma unroll 1
    for (int n = 0; n <= 2 * LAYERS; n++) {
      here.layer = n / 2;
      if (n == 2 * LAYERS && here.member) return;
      if (n) columns_of_b(n % 2 ? given.out_b : given.down_b, here.of_policy() - (n % 2 ? 0 : POLICIES));
      if (n == 2 * LAYERS) return;
      low(n % 2 ? given.gated_a : given.qkv_a, low_units(n));
      if (n % 2 == 0) {
        expect_words(here.layer + 1);
        for (int unit = here.member; unit < QKV_UNITS; unit += BLOCKS) query_key_value(unit);
        for (int unit = here.member; unit < HEAD_UNITS; unit += BLOCKS) attention(unit);
        for (int unit = here.member; unit < OUT_UNITS; unit += BLOCKS) output(unit);
      } else {
        if (here.member < GATED_UNITS) gate_and_up(here.member);
        if (SHORT) ring.await_end();
        for (int unit = here.member; unit < DOWN_UNITS; unit += BLOCKS) down(unit);
      }
    }
  }
};
