// What feeders send to the warps that compute, by way of shared memory.

#pragma once
#include "words.cuh"

constexpr int PIECE = 512, SLOT = STEPS * PIECE;  // bytes: what a warp multiplies with at a time, and is sent at a time
constexpr int SCALE_BYTES = STEPS * 16 * 2;       // of one norm, a warp's columns

struct alignas(128) Shared {
  unsigned char ring[WARPS][RING][SLOT];
  alignas(16) unsigned char stage[STAGE];
  float rotary[4][HEAD];  // scales of queries' and keys' norms, cosines and sines
  unsigned char scales[WARPS][2 * SCALE_BYTES];
  float squares[4][ROWS][WARPS];
  unsigned long long full[WARPS][RING], empty[WARPS][RING];

  float4 (&sums())[SUMS][WARPS][32] {
    static_assert(SUMS * THREADS * 16 <= STAGE, "sums");
    return *(float4(*)[SUMS][WARPS][32])stage;
  }
};

void await_phase(u32 barrier, u32 phase) {
  while (!is_over(barrier, phase)) {
  }
}

// The slots of one warp. Its feeder puts, the warp itself waits for as many as it likes, reads and gives them back.
//
// A slot may be given back when what was read of it is there, not when it has been asked for: a copy that comes soon would
// still find it unread. So the barrier's address depends on the last word that was read, by way of a zero that the compiler
// does not know.
struct Ring {
  u32 data, full, empty, at = 0, phase = 0, zero, read = 0;

  Ring(Shared& shared, int warp, u32 zero)
      : data(address(shared.ring[warp])), full(address(shared.full[warp])), empty(address(shared.empty[warp])), zero(zero) {}
  u32 wrapped(int ahead) const { return at + ahead < RING ? at + ahead : at + ahead - RING; }
  uint4 piece(int ahead, int n, int lane) {
    const uint4 x = read_shared(data + wrapped(ahead) * SLOT + n * PIECE + lane * 16);
    read = x.w;
    return x;
  }
  void advance(int count) {
    phase ^= at + count >= RING;
    at = wrapped(count);
  }

  void await_slots(int count, int lane) const {
    if (lane < count) await_phase(full + wrapped(lane) * 8, phase ^ (at + lane >= RING));
    __syncwarp();
  }
  void give(int count, int lane) {
    __syncwarp();
    if (lane < count) arrive(empty + wrapped(lane) * 8 + (read & zero));
    advance(count);
  }

  // Until all that was put has been given back.
  void await_end() const {
    const u32 last = at ? at - 1 : RING - 1;
    await_phase(empty + last * 8, at ? phase : phase ^ 1);
  }
  void expect(int bytes) const {
    await_phase(empty + at * 8, phase ^ 1);
    arrive_and_expect(full + at * 8, bytes);
  }
  // `kept`: whether the second level of cache should hold it, as it should what all blocks or several teams read.
  void copy(int offset, const void* from, int bytes, bool kept = TEAMS > 1) const {
    const u32 to = data + at * SLOT + offset;
    kept ? copy_bulk(to, from, bytes, full + at * 8) : copy_bulk_through(to, from, bytes, full + at * 8);
  }
  void put(const void* from, int bytes, bool kept = TEAMS > 1) {
    expect(bytes);
    copy(0, from, bytes, kept);
    advance(1);
  }
  void put_pieces(const uint4* from, int pieces, int each, bool kept = TEAMS > 1) {
    for (int n = 0; n < pieces; n += each) put(from + n * 32, each * PIECE, kept);
  }
};

constexpr int fitting(int pieces) {  // the most pieces that divide these and fit a slot
  int most = 1;
  for (int n = 1; n <= pieces && n <= STEPS; n++)
    if (pieces % n == 0) most = n;
  return most;
}
