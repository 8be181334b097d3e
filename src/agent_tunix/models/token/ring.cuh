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

u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

void await_phase(u32 barrier, u32 phase) {
  int done;
  do asm volatile(
        "{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.s32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(phase)
        : "memory");
  while (!done);
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
    if (lane < count)
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty + wrapped(lane) * 8) : "memory");
    advance(count);
  }

  void expect(int bytes) const {
    await_phase(empty + at * 8, phase ^ 1);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full + at * 8), "r"(bytes) : "memory");
  }
  void copy(int offset, const void* from, int bytes) const {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     data + at * SLOT + offset),
                 "l"(from), "r"(bytes), "r"(full + at * 8)
                 : "memory");
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

uint4 piece(u32 slot, int n, int lane) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(slot + n * PIECE + lane * 16)
               : "memory");
  return x;
}

// Sixteen bytes that no slot is worth; `cp.async.wait_all` before they are used.
void copy_ahead(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
