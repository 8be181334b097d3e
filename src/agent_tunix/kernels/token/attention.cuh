// Attention of one token to the keys before it. A unit is one sequence, one head of keys and a share of its tiles of keys; the
// share that has the newest keys takes the token's own along and keeps them for the next.
//
// A tile of keys or values lies as lanes hold it as a left operand, sixteen keys, or sixteen dimensions, at a time. So
// queries and probabilities are right operands, of eight columns of which the heads that share these keys fill the first. Each
// warp sees tiles of its own, without waiting for others; what they have seen is added up at the end.

#pragma once
#include "stream.cuh"

constexpr int KEY_PIECES = STEPS < 4 ? 2 : STEPS < 8 ? 4 : 8;  // of a slot
constexpr int KEY_SLOTS = HEAD / 16 / KEY_PIECES;              // of a tile of keys, and of values
constexpr float LOWEST = -1e30f;

struct Attending {
  bf16 q[PER_KV + 1][HEAD + 32];  // queries, and the token's own key
  float value[HEAD], attended[PER_KV][WARPS][DIMS + 4], most[PER_KV][WARPS], sum[PER_KV][WARPS], own_score[PER_KV];
};
static_assert(sizeof(Attending) <= STAGE && PER_KV + 2 <= WARPS && HEAD % (16 * PASSES) == 0, "attention");

// Which of all prompts a row of a team follows; rows that fill up the team, the last of its policy.
int prompt_of(int team, int row) {
  return team / TEAMS_EACH * PROMPTS + smaller((team % TEAMS_EACH * ROWS + row) / GROUP, PROMPTS - 1);
}

// What one unit sees: a share of the tiles of keys that its sequence sees, the prompt's and then its own.
struct Span {
  int row, kv, share, slot, prompt_tiles, seen, own_seen, begin, end;
  size_t prompt, own;

  Span(const int* lengths, int team, int unit, int slot, int window) : slot(slot) {
    share = unit % SHARES, kv = unit / SHARES % KV_HEADS, row = unit / SHARES / KV_HEADS;
    constexpr int S = PROMPT_TILES * KEYS;
    const int index = prompt_of(team, row), before = S + slot + 1 - window;
    seen = max(S - lengths[index], before), own_seen = max(0, before - S);
    prompt_tiles = max(0, PROMPT_TILES - seen / KEYS);
    const int tiles = prompt_tiles + max(0, parts_of(slot, KEYS) - own_seen / KEYS);
    begin = tiles * share / SHARES, end = tiles * (share + 1) / SHARES;
    prompt = (size_t)index * PROMPT_TILES + seen / KEYS;
    own = (size_t)POLICIES * PROMPTS * PROMPT_TILES + (size_t)(team * ROWS + row) * OWN_TILES;
  }
  bool newest() const { return share == SHARES - 1; }
  size_t at(int n) const {  // where a tile lies, in units of sixteen bytes
    const size_t tile = n < prompt_tiles ? prompt + n : own + own_seen / KEYS + n - prompt_tiles;
    return (tile * KV_HEADS + kv) * (KEYS * HEAD / 8);
  }
  bool sees(int n, int key) const {
    const bool of_prompt = n < prompt_tiles;
    const int place = (of_prompt ? seen / KEYS + n : own_seen / KEYS + n - prompt_tiles) * KEYS + key;
    return place >= (of_prompt ? seen : own_seen) && (of_prompt || place < slot);
  }
};

float warp_sum(float x) {
  for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
  return x;
}

void unpack(float (&x)[8], const uint4& pairs) {
  x[0] = first(pairs.x), x[1] = second(pairs.x), x[2] = first(pairs.y), x[3] = second(pairs.y);
  x[4] = first(pairs.z), x[5] = second(pairs.z), x[6] = first(pairs.w), x[7] = second(pairs.w);
}

// Has what turns a row's queries and keys brought.
void ask_for_rotary(Shared& shared, const float* head_norms, const float* angles) {
  for (int n = this_thread(); n < HEAD; n += THREADS)
    copy_ahead(address(shared.rotary) + n * 16, n < HEAD / 2 ? head_norms + n * 4 : angles + (n - HEAD / 2) * 4);
}

// A head after norm and RoPE, by one warp; a lane has eight neighbouring numbers, its partner those half a head away.
void rotate(float (&x)[8], const float* scale, const float* cosines, const float* sines, int lane) {
  float squares = 0;
#pragma unroll
  for (int n = 0; n < 8; n++) squares += x[n] * x[n];
  const float inverse = rsqrtf(warp_sum(squares) * (1.0f / HEAD) + EPS);
#pragma unroll
  for (int n = 0; n < 8; n++) {
    const float mine = rounded(x[n] * inverse * (1 + scale[lane * 8 + n])), other = __shfl_xor_sync(~0u, mine, 16);
    x[n] = rounded(mine * cosines[lane * 8 + n] + other * sines[lane * 8 + n]);
  }
}

// Queries, and of the newest share the token's own key and value, a warp each; then the token's scores with itself.
void prepare(const Shared& all, Attending& shared, const u32* words, const Span& span, int warp, int lane) {
  if (warp < PER_KV || (span.newest() && warp < PER_KV + 2)) {
    const int head = warp < PER_KV ? span.kv * PER_KV + warp : HEADS + (warp - PER_KV) * KV_HEADS + span.kv;
    uint4 pairs[1];
    collect(pairs, [&](int) { return words + QKV_AT + (span.row * QKV + head * HEAD) / 2 + lane * 4; });
    float x[8];
    unpack(x, pairs[0]);
    if (warp <= PER_KV) {
      const float scale = warp < PER_KV ? SCALE : 1;
      rotate(x, all.rotary[warp < PER_KV ? 0 : 1], all.rotary[2], all.rotary[3], lane);
      *(uint4*)&shared.q[warp][lane * 8] = make_uint4(pack(x[0] * scale, x[1] * scale), pack(x[2] * scale, x[3] * scale),
                                                      pack(x[4] * scale, x[5] * scale), pack(x[6] * scale, x[7] * scale));
    } else {
#pragma unroll
      for (int n = 0; n < 8; n++) shared.value[lane * 8 + n] = x[n];
    }
  }
  synchronise();
  const int head = WARPS - 1 - warp;
  if (head >= PER_KV) return;
  float x[8], y[8], score = 0;
  unpack(x, *(const uint4*)&shared.q[head][lane * 8]);
  unpack(y, *(const uint4*)&shared.q[PER_KV][lane * 8]);
#pragma unroll
  for (int n = 0; n < 8; n++) score += x[n] * y[n];
  score = warp_sum(score);
  if (lane == 0) shared.own_score[head] = span.newest() ? score : 2 * LOWEST;
}

// What a warp has seen so far: of two heads the greatest score, from it on the sum of its lane's probabilities, and values.
struct Attended {
  float2 most = {LOWEST, LOWEST}, total = {0, 0};
  float4 out[HEAD / 16] = {};
};

// Scores of a tile of keys: of two keys and of two heads.
float4 score_tile(const Attending& shared, Ring& ring, const Span& span, int tile, int lane) {
  const int g = lane / 4, t = lane % 4;
  float4 parts[4] = {};
  ring.await_slots(KEY_SLOTS, lane);
#pragma unroll
  for (int n = 0; n < HEAD / 16; n += 2) {
    const uint4 q = *(const uint4*)&shared.q[g % PER_KV][n * 16 + t * 8];
    multiply(parts[n % 4], ring.piece(n / KEY_PIECES, n % KEY_PIECES, lane), q.x, q.y);
    multiply(parts[n % 4 + 1], ring.piece(n / KEY_PIECES, n % KEY_PIECES + 1, lane), q.z, q.w);
  }
  ring.give(KEY_SLOTS, lane);
  const float4 score = (parts[0] + parts[1]) + (parts[2] + parts[3]);
  auto if_seen = [&](float x, int key) { return span.sees(tile, key) ? x : 2 * LOWEST; };
  return {if_seen(score.x, g), if_seen(score.y, g), if_seen(score.z, g + 8), if_seen(score.w, g + 8)};
}

// Adds the values of a tile by its scores.
void add_values(Ring& ring, float4 score, Attended& sofar, int lane) {
  float2 now = {fmaxf(sofar.most.x, fmaxf(score.x, score.z)), fmaxf(sofar.most.y, fmaxf(score.y, score.w))};
#pragma unroll
  for (int other = 4; other < 32; other *= 2)
    now = {fmaxf(now.x, __shfl_xor_sync(~0u, now.x, other)), fmaxf(now.y, __shfl_xor_sync(~0u, now.y, other))};
  const float2 fade = {__expf(sofar.most.x - now.x), __expf(sofar.most.y - now.y)};
  const float4 p = {__expf(score.x - now.x), __expf(score.y - now.y), __expf(score.z - now.x), __expf(score.w - now.y)};
  sofar.most = now, sofar.total = {sofar.total.x * fade.x + (p.x + p.z), sofar.total.y * fade.y + (p.y + p.w)};
  const u32 upper = transposed(pack(p.x, p.y)), lower = transposed(pack(p.z, p.w));
#pragma unroll
  for (float4& x : sofar.out) x = {x.x * fade.x, x.y * fade.y, x.z * fade.x, x.w * fade.y};
  ring.await_slots(KEY_SLOTS, lane);
#pragma unroll
  for (int n = 0; n < HEAD / 16; n++)
    multiply(sofar.out[n], ring.piece(n / KEY_PIECES, n % KEY_PIECES, lane), upper, lower);
  ring.give(KEY_SLOTS, lane);
}

// What a warp leaves for the sum over warps: of all heads, and of the dimensions of one pass.
void gather(Attending& shared, const Attended& sofar, int pass, int warp, int lane) {
  const int g = lane / 4, t = lane % 4;
  auto keep = [&](int dim, int head, float a, float b) {
    if (head < PER_KV) shared.attended[head][warp][dim] = a, shared.attended[head][warp][dim + 8] = b;
  };
#pragma unroll
  for (int n = 0; n < HEAD / 16; n++)
    if (n / (DIMS / 16) == pass) {
      const int dim = n % (DIMS / 16) * 16 + g;
      keep(dim, 2 * t, sofar.out[n].x, sofar.out[n].z), keep(dim, 2 * t + 1, sofar.out[n].y, sofar.out[n].w);
    }
}
void gather_sums(Attending& shared, const Attended& sofar, int warp, int lane) {
  float2 total = sofar.total;
#pragma unroll
  for (int other = 4; other < 32; other *= 2)
    total = {total.x + __shfl_xor_sync(~0u, total.x, other), total.y + __shfl_xor_sync(~0u, total.y, other)};
  const int head = lane * 2;
  if (head < PER_KV) shared.most[head][warp] = sofar.most.x, shared.sum[head][warp] = total.x;
  if (head + 1 < PER_KV) shared.most[head + 1][warp] = sofar.most.y, shared.sum[head + 1][warp] = total.y;
}

// Where the left operand of the product after attention has a pair of numbers.
int place_of(int row, int input) {
  return (input / 16 * 32 + row % 8 * 4 + input % 8 / 2) * 4 + row / 8 + input % 16 / 8 * 2;
}

// A pair of neighbouring dimensions of a head as this share sees it, by so many warps, with the logarithm of its weight.
void leave_share(const Attending& shared, u32* words, const Span& span, int warps, int h, int pass, int dim) {
  const int whole_dim = pass * DIMS + dim;
  float most = shared.own_score[h];
  for (int w = 0; w < warps; w++) most = fmaxf(most, shared.most[h][w]);
  float sum = 0, x = 0, y = 0;
  if (span.newest()) {
    sum = __expf(shared.own_score[h] - most);
    x = sum * shared.value[whole_dim], y = sum * shared.value[whole_dim + 1];
  }
  for (int w = 0; w < warps; w++) {
    const float weight = __expf(shared.most[h][w] - most);
    const float2 part = *(const float2*)&shared.attended[h][w][dim];
    sum += weight * shared.sum[h][w], x += weight * part.x, y += weight * part.y;
  }
  const float inverse = sum > 0 ? __fdividef(1.0f, sum) : 0;
  const u32 pair = pack(x * inverse, y * inverse);
  if (SHARES == 1) {
    leave(words + ATTENDED_AT + place_of(span.row, (span.kv * PER_KV + h) * HEAD + whole_dim), pair);
  } else {
    const int at = ((span.row * KV_HEADS + span.kv) * SHARES + span.share) * PER_KV + h;
    leave(words + PARTS_AT + (at * HEAD + whole_dim) / 2, pair);
    if (whole_dim == 0) leave(words + LOGS_AT + at, __float_as_uint(sum > 0 ? most + __logf(sum) : LOWEST));
  }
}

// The token's own key and value into the cache, for the tokens after it.
void keep_own(const Attending& shared, const Span& span, bf16* keys, bf16* values, int dim) {
  const int key = span.slot % KEYS;
  const size_t at = ((span.own + span.slot / KEYS) * KV_HEADS + span.kv) * (KEYS * HEAD);
  keys[at + dim / 32 * 512 + dim / 4 % 2 * 256 + (key % 8 * 4 + dim / 8 % 4) * 8 + dim / 2 % 2 * 4 + key / 8 * 2 + dim % 2] =
      shared.q[PER_KV][dim];
  values[at + dim / 16 * 256 + (dim % 8 * 4 + key % 8 / 2) * 8 + key / 8 * 4 + dim / 8 % 2 * 2 + key % 2] =
      pack(shared.value[dim], 0);
}

void attend(Shared& all, Ring& ring, u32* words, const Span& span, bf16* keys, bf16* values) {
  Attending& shared = *(Attending*)all.stage;
  const int thread = this_thread(), warp = thread / 32, lane = thread % 32;
  await_copies();
  synchronise();
  prepare(all, shared, words, span, warp, lane);
  Attended sofar;
#pragma unroll 1
  for (int tile = span.begin + warp; tile < span.end; tile += WARPS)
    add_values(ring, score_tile(shared, ring, span, tile, lane), sofar, lane);
  gather_sums(shared, sofar, warp, lane);
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    if (pass) synchronise();  // what lay there has been added up
    gather(shared, sofar, pass, warp, lane);
    synchronise();
#pragma unroll 1
    for (int i = thread; i < PER_KV * DIMS / 2; i += THREADS)
      leave_share(shared, words, span, min(WARPS, span.end - span.begin), i / (DIMS / 2), pass, i % (DIMS / 2) * 2);
  }
  if (span.newest())
    for (int dim = thread; dim < HEAD; dim += THREADS) keep_own(shared, span, keys, values, dim);
}

// A share's part of the sum of all shares of a row's heads.
void combine(u32* words, const Span& span) {
  constexpr int PAIRS = PER_KV * HEAD / 2 / SHARES;
  const int at = (span.row * KV_HEADS + span.kv) * SHARES * PER_KV;
  const int warp = this_thread() / 32, lane = this_thread() % 32;
  for (int from = warp * 32; from < PAIRS; from += THREADS) {  // by whole warps, of which the last may do one pair twice
    const int i = span.share * PAIRS + min(from + lane, PAIRS - 1);
    const int h = i / (HEAD / 2), dim = i % (HEAD / 2) * 2;
    u32 found[2 * SHARES], *part = found, *log = found + SHARES;
    collect(found, [&](int n) {
      const int share = at + n % SHARES * PER_KV + h;
      return words + (n < SHARES ? PARTS_AT + (share * HEAD + dim) / 2 : LOGS_AT + share);
    });
    float most = LOWEST, sum = 0, x = 0, y = 0;
#pragma unroll
    for (int z = 0; z < SHARES; z++) most = fmaxf(most, __uint_as_float(log[z]));
#pragma unroll
    for (int z = 0; z < SHARES; z++) {
      const float weight = __expf(__uint_as_float(log[z]) - most);
      sum += weight, x += weight * first(part[z]), y += weight * second(part[z]);
    }
    const float inverse = __fdividef(1.0f, sum);
    leave(words + ATTENDED_AT + place_of(span.row, (span.kv * PER_KV + h) * HEAD + dim), pack(x * inverse, y * inverse));
  }
}
