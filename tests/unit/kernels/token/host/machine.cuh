// What the kernel asks of the hardware, done by a CPU that makes the worst of it: copies arrive late and in any order, and
// until then what lay there is gone. Where the kernel does what hardware would not forgive, it ends.

#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "fibers.h"

#define __global__
#define __launch_bounds__(...)
#define rsqrtf(x) (1.0f / std::sqrt(x))
#define __expf(x) std::exp(x)
#define __logf(x) std::log(x)
#define __fdividef(x, y) ((x) / (y))
#define threadIdx (Index{(unsigned)current->thread})
#define blockIdx (Index{(unsigned)current->block->index})
#define SHARED_MEMORY(name) unsigned char* name = here().memory.get()

typedef unsigned short bf16;
typedef unsigned int u32;
struct Index {
  unsigned x;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  u32 x, y;
};
struct alignas(16) uint4 {
  u32 x, y, z, w;
};
uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
int min(int a, int b) { return a < b ? a : b; }
int max(int a, int b) { return a > b ? a : b; }
float __uint_as_float(u32 x) {
  float y;
  return memcpy(&y, &x, 4), y;
}
u32 __float_as_uint(float x) {
  u32 y;
  return memcpy(&y, &x, 4), y;
}

constexpr int ALL_THREADS = 2 * 32 * WARPS;

struct Warp {
  Meeting meeting;
  float value[32], result[32];
  int from[32];
  float4* sum[32];
  uint4 left[32];
  uint2 right[32];
};
struct Copy {
  u32 to, barrier;
  const void* from;
  int bytes;
};
struct Machine : Block {
  std::unique_ptr<unsigned char, decltype(&free)> memory{(unsigned char*)aligned_alloc(128, SHARED_BYTES), free};
  Warp warps[ALL_THREADS / 32];
  Meeting all, some;
  std::vector<Copy> copies;  // that are under way
};
struct Array {
  unsigned char* at;
  size_t bytes;
};
static std::vector<Array> arrays;  // all of global memory that there is

static Machine& here() { return *(Machine*)current->block; }
static Warp& this_warp() { return here().warps[current->thread / 32]; }
static int this_lane() { return current->thread % 32; }
int this_thread() { return current->thread; }

static void require_global(const void* p, size_t bytes, size_t alignment) {
  require((uintptr_t)p % alignment == 0, "an address in global memory is not aligned");
  for (const Array& array : arrays)
    if (p >= array.at && (unsigned char*)p + bytes <= array.at + array.bytes) return;
  fail("an address is outside of all arrays that were given");
}
static unsigned char* in_shared(u32 p, size_t bytes, size_t alignment) {
  require(p % alignment == 0, "an address in shared memory is not aligned");
  require(p + bytes <= SHARED_BYTES, "an address is outside of shared memory");
  return here().memory.get() + p;
}
u32 address(const void* p) { return (unsigned char*)p - here().memory.get(); }

template <int COUNT>
void leave_registers() {}
template <int COUNT>
void take_registers() {}

// What threads do together.
enum Purpose { SYNCHRONISE, SHUFFLE, MULTIPLY, TRANSPOSE };

void __syncthreads() {
  meet_at(here().all, ALL_THREADS, SYNCHRONISE, [] {});
}
template <int THREADS>
void meet() {
  meet_at(here().some, THREADS, SYNCHRONISE, [] {});
}
void __syncwarp() {
  meet_at(this_warp().meeting, 32, SYNCHRONISE, [] {});
}
float __shfl_sync(u32 lanes, float x, int from) {
  require(lanes == ~0u && from >= 0 && from < 32, "a shuffle of lanes that there are not");
  Warp& warp = this_warp();
  const int lane = this_lane();
  warp.value[lane] = x, warp.from[lane] = from;
  meet_at(warp.meeting, 32, SHUFFLE, [&] {
    for (int n = 0; n < 32; n++) warp.result[n] = warp.value[warp.from[n]];
  });
  return warp.result[lane];
}
float __shfl_xor_sync(u32 lanes, float x, int apart) { return __shfl_sync(lanes, x, this_lane() ^ apart); }

bool __any_sync(u32 lanes, bool x) {
  for (int apart = 16; apart; apart /= 2) x |= __shfl_xor_sync(lanes, x, apart) != 0;
  return x;
}

static float half_of(u32 pair, int which) { return __uint_as_float(which ? pair & 0xffff0000u : pair << 16); }

// As PTX has it of mma.m16n8k16: lane = 4 g + t has of the left operand rows g and g + 8 of inputs 2t, 2t + 1 and eight
// later, of the right one the same inputs of column g, and of the sums columns 2t and 2t + 1 of rows g and g + 8. It is most
// of what is to be computed.
__attribute__((optimize("O3"))) static void multiply_all(Warp& warp) {
  typedef float Eight __attribute__((vector_size(32)));
  float a[16][16];
  Eight b[16], c[16];
  for (int lane = 0; lane < 32; lane++) {
    const int g = lane / 4, t = lane % 4;
    const uint4 left = warp.left[lane];
    for (int j = 0; j < 2; j++) {
      a[g][2 * t + j] = half_of(left.x, j), a[g + 8][2 * t + j] = half_of(left.y, j);
      a[g][2 * t + 8 + j] = half_of(left.z, j), a[g + 8][2 * t + 8 + j] = half_of(left.w, j);
      b[2 * t + j][g] = half_of(warp.right[lane].x, j), b[2 * t + 8 + j][g] = half_of(warp.right[lane].y, j);
    }
    const float4 sum = *warp.sum[lane];
    c[g][2 * t] = sum.x, c[g][2 * t + 1] = sum.y, c[g + 8][2 * t] = sum.z, c[g + 8][2 * t + 1] = sum.w;
  }
  for (int row = 0; row < 16; row++) {
    Eight sum = c[row];
    for (int k = 0; k < 16; k++) sum += a[row][k] * b[k];
    c[row] = sum;
  }
  for (int lane = 0; lane < 32; lane++) {
    const int g = lane / 4, t = lane % 4;
    *warp.sum[lane] = {c[g][2 * t], c[g][2 * t + 1], c[g + 8][2 * t], c[g + 8][2 * t + 1]};
  }
}
void multiply(float4& sum, const uint4& a, u32 b0, u32 b1) {
  Warp& warp = this_warp();
  const int lane = this_lane();
  warp.sum[lane] = &sum, warp.left[lane] = a, warp.right[lane] = {b0, b1};
  meet_at(warp.meeting, 32, MULTIPLY, [&] { multiply_all(warp); });
}

// As PTX has it of movmatrix.m8n8: lane = 4 g + t has columns 2t and 2t + 1 of row g, and then rows 2t and 2t + 1 of column g.
u32 transposed(u32 pair) {
  Warp& warp = this_warp();
  const int lane = this_lane();
  warp.right[lane].x = pair;
  meet_at(warp.meeting, 32, TRANSPOSE, [&] {
    for (int n = 0; n < 32; n++) {
      const int column = n / 4, row = n % 4 * 2;
      auto at = [&](int row) { return warp.right[row * 4 + column / 2].x >> column % 2 * 16 & 0xffff; };
      warp.right[n].y = at(row) | at(row + 1) << 16;
    }
  });
  return warp.right[lane].y;
}

static u32 rounded_to_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
u32 pack(float x, float y) { return rounded_to_bf16(x) | rounded_to_bf16(y) << 16; }

// Words and counters in global memory.
template <class T>
void leave(u32* p, T x) {
  require_global(p, sizeof(T), sizeof(T));
  memcpy(p, &x, sizeof(T));
  something_happened();
}
static bool any_missing(const u32* x, int count) {
  for (int n = 0; n < count; n++)
    if (x[n] == ~0u) return true;
  return false;
}
template <class T>
void look(T& x, const u32* p) {
  require_global(p, sizeof(T), sizeof(T));
  if (any_missing(p, sizeof(T) / 4)) look_again_later();
  memcpy(&x, p, sizeof(T));
}
void look(int& x, const int* p) {
  require_global(p, 4, 4);
  look_again_later();
  x = *p;
}
void count(int* counter) {
  require_global(counter, 4, 4);
  ++*counter;
  something_happened();
}

// Barriers in shared memory, each of which awaits one arrival and so many bytes.
struct Barrier {
  short pending, phase;
  int bytes;
};
static Barrier& barrier_at(u32 p) { return *(Barrier*)in_shared(p, 8, 8); }
static void end_phase(Barrier& barrier) {
  require(barrier.pending >= 0 && barrier.bytes >= 0, "a barrier is given more than it awaits");
  if (barrier.pending == 0 && barrier.bytes == 0) barrier.pending = 1, barrier.phase ^= 1;
  something_happened();
}
void make_barrier(u32 p) { barrier_at(p) = {1, 0, 0}; }
void barriers_are_made() {}
void arrive(u32 p) {
  barrier_at(p).pending--;
  end_phase(barrier_at(p));
}
void arrive_and_expect(u32 p, int bytes) {
  barrier_at(p).bytes += bytes;
  arrive(p);
}

static void finish_some_copy() {
  std::vector<Copy>& copies = here().copies;
  if (copies.empty()) return;
  std::swap(copies[draw(copies.size())], copies.back());
  const Copy copy = copies.back();
  copies.pop_back();
  memcpy(in_shared(copy.to, copy.bytes, 16), copy.from, copy.bytes);
  barrier_at(copy.barrier).bytes -= copy.bytes;
  end_phase(barrier_at(copy.barrier));
}
int is_over(u32 p, u32 phase) {
  if (barrier_at(p).phase != (int)phase) return 1;
  finish_some_copy();
  look_again_later();
  return barrier_at(p).phase != (int)phase;
}
void copy_bulk(u32 to, const void* from, int bytes, u32 barrier) {
  require(bytes > 0 && bytes % 16 == 0, "a copy is not of sixteens of bytes");
  require_global(from, bytes, 16);
  memset(in_shared(to, bytes, 16), 0xff, bytes);
  here().copies.push_back({to, barrier, from, bytes});
}
void copy_bulk_through(u32 to, const void* from, int bytes, u32 barrier) { copy_bulk(to, from, bytes, barrier); }
void fetch(const void* from, int bytes) {
  require(bytes > 0 && bytes % 16 == 0, "a fetch is not of sixteens of bytes");
  require_global(from, bytes, 16);
}

void copy_ahead(u32 to, const void* from) {
  require_global(from, 16, 16);
  Ahead copy{in_shared(to, 16, 16), {}};
  memcpy(copy.from, from, 16);
  memset(copy.to, 0xff, 16);
  current->ahead.push_back(copy);
}
void await_copies() {
  for (const Ahead& copy : current->ahead) memcpy(copy.to, copy.from, 16);
  current->ahead.clear();
}
uint4 read_shared(u32 from) { return *(const uint4*)in_shared(from, 16, 16); }
