// What feeders send to the warps that compute, by way of shared memory.

#pragma once
#include "words.cuh"

constexpr int PIECE = 512, SLOT = STEPS * PIECE;  // bytes: what a warp multiplies with at a time, and is sent at a time
constexpr int SCALE_BYTES = STEPS * 16 * 4;       // of one norm, a warp's columns
constexpr int SUMS_BYTES = SUMS * THREADS * 16;

struct alignas(128) Shared {
  unsigned char ring[WARPS][RING][SLOT];
  alignas(16) unsigned char stage[larger(SUMS_BYTES, 16384)];  // what a stage needs for itself
  float rotary[4][HEAD];                                       // scales of queries' and keys' norms, cosines and sines
  unsigned char scales[WARPS][2 * SCALE_BYTES];
  float squares[2][ROWS][WARPS];
  unsigned long long full[WARPS][RING], empty[WARPS][RING];

  float4 (&sums())[SUMS][WARPS][32] { return *(float4(*)[SUMS][WARPS][32])stage; }
};

void await_phase(u32 barrier, u32 phase) {
  while (!is_over(barrier, phase)) {
  }
}

// The slots of one warp. Its feeder puts, the warp itself waits for as many as it likes and gives them back.
struct Ring {
  u32 data, full, empty, at, phase;

  Ring(Shared& shared, int warp)
      : data(address(shared.ring[warp])), full(address(shared.full[warp])), empty(address(shared.empty[warp])), at(0), phase(0) {}
  u32 wrapped(int ahead) const { return at + ahead < RING ? at + ahead : at + ahead - RING; }
  u32 slot(int ahead) const { return data + wrapped(ahead) * SLOT; }
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
    if (lane < count) arrive(empty + wrapped(lane) * 8);
    advance(count);
  }

  void expect(int bytes) const {
    await_phase(empty + at * 8, phase ^ 1);
    arrive_and_expect(full + at * 8, bytes);
  }
  void copy(int offset, const void* from, int bytes) const {
    copy_bulk(data + at * SLOT + offset, from, bytes, full + at * 8);
  }
  void put(const void* from, int bytes) {
    expect(bytes);
    copy(0, from, bytes);
    advance(1);
  }
  void put_pieces(const uint4* from, int pieces, int each) {
    for (int n = 0; n < pieces; n += each) put(from + n * 32, each * PIECE);
  }
};

constexpr int fitting(int pieces) {  // the most pieces that divide these and fit a slot
  int most = 1;
  for (int n = 1; n <= pieces && n <= STEPS; n++)
    if (pieces % n == 0) most = n;
  return most;
}

uint4 piece(u32 slot, int n, int lane) { return read_shared(slot + n * PIECE + lane * 16); }
