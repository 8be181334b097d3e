// Sizes, numbers, and the words that blocks leave for each other.
//
// token_kernel.py gives as macros: ROWS, sequences of a team; HEAD, size of a head; KEYS of a tile; COUNTERS of a team, APART
// from each other; WARPS that compute, and as many feeders; LAYERS, WIDTH, HIDDEN, HEADS, KV_HEADS, WINDOW, GLOBALS (a bit for
// each layer), what EMBEDDED tokens and the SCALE of queries are multiplied by, EPS of norms; RANK; POLICIES, PROMPTS of each,
// GROUP sequences a prompt, PROMPT_TILES and OWN_TILES of keys; TEAMS, TEAMS_EACH policy and BLOCKS of each team; RING, slots
// of a warp; and how work is cut: QKV_C sixteens of columns to a unit, QKV_SUB of them and GATED_SUB at a time, OUT_N and DOWN_N
// eights of columns, DOWN_Z shares of the sum of "down", SHARES of a sequence's keys, PASSES over a head's dimensions; STAGE,
// bytes that a stage has for itself.

#pragma once
#include <machine.cuh>

constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int parts_of(int all, int each) { return (all + each - 1) / each; }

constexpr int THREADS = 32 * WARPS;
constexpr int STEPS = WIDTH / (16 * WARPS), TILES = 2 * STEPS;  // sixteens of inputs, and eights of columns, that a warp has
constexpr int LOW = RANK / 8, PER_KV = HEADS / KV_HEADS, QKV = (HEADS + 2 * KV_HEADS) * HEAD;
constexpr int DIMS = HEAD / PASSES;  // of a head, whose sums over the warps are taken at a time
constexpr int CACHE_TILES = POLICIES * PROMPTS * PROMPT_TILES + TEAMS * ROWS * OWN_TILES;

constexpr int OUT_TILES = WIDTH / 8 + LOW, OUT_UNITS = parts_of(OUT_TILES, OUT_N);
constexpr int DOWN_UNITS = parts_of(OUT_TILES, DOWN_N) * DOWN_Z;
constexpr int QKV_UNITS = QKV / (16 * QKV_C), GATED_UNITS = smaller(BLOCKS, HIDDEN / 16), HEAD_UNITS = ROWS * KV_HEADS * SHARES;
constexpr int SUMS = larger(larger(2 * QKV_SUB, 4 * GATED_SUB), larger(OUT_N, DOWN_N));  // tiles that are added up at a time

// Where a unit's sixteens of gate and up begin: all have equally many, and the first of them one more.
int gated_begin(int unit) { return HIDDEN / 16 / GATED_UNITS * unit + smaller(unit, HIDDEN / 16 % GATED_UNITS); }

// Where the words of a layer lie.
constexpr int QKV_AT = 0, PARTS_AT = QKV_AT + ROWS * QKV / 2;
constexpr int LOGS_AT = PARTS_AT + (SHARES > 1) * ROWS * SHARES * HEADS * HEAD / 2;
constexpr int ATTENDED_AT = LOGS_AT + (SHARES > 1) * ROWS * SHARES * HEADS, OUT_AT = ATTENDED_AT + ROWS * HEADS * HEAD / 2;
constexpr int GATED_AT = OUT_AT + OUT_TILES * 64, DOWN_AT = GATED_AT + ROWS * HIDDEN / 2;
constexpr int QKV_LOW_AT = DOWN_AT + OUT_TILES * 64, GATED_LOW_AT = QKV_LOW_AT + 3 * LOW * 64;
constexpr int SHARES_AT = GATED_LOW_AT + 2 * LOW * 64;
constexpr int WORDS = SHARES_AT + (DOWN_Z > 1) * DOWN_Z * OUT_TILES * 128;
static_assert(WORDS == LAYER_WORDS && WORDS % 4 == 0, "words of a layer");

enum Counter { ATTENDED, PUT_OUT, GATED, DOWN };
static_assert(DOWN + 1 == COUNTERS, "counters");
constexpr u32 MISSING = ~0u;

float first(u32 pair) { return __uint_as_float(pair << 16); }
float second(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
uint2 pack(float4 x) { return make_uint2(pack(x.x, x.y), pack(x.z, x.w)); }
float rounded(float x) { return first(pack(x, 0)); }
float4 operator+(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

void synchronise() { meet<THREADS>(); }  // all warps but the feeders

bool missing(u32 x) { return x == MISSING; }
bool missing(const uint4& x) { return x.x == MISSING | x.y == MISSING | x.z == MISSING | x.w == MISSING; }

// Words that other blocks leave, each from where `at` says, all asked for at once, and again as long as any lane misses one:
// lanes that went on by themselves would come to barriers apart.
template <class T, int COUNT, class At>
void collect(T (&x)[COUNT], At at) {
  bool again;
  do {
    again = false;
#pragma unroll
    for (int n = 0; n < COUNT; n++) look(x[n], at(n));
#pragma unroll
    for (int n = 0; n < COUNT; n++) again |= missing(x[n]);
  } while (__any_sync(~0u, again));
}

// One thread of a unit counts, shortly before its words: it takes as long to be seen as they do to be there.
void await(const int* counter, int units) {
  if (threadIdx.x == 0) {
    int seen;
    do look(seen, counter);
    while (seen < units);
  }
  synchronise();
}
