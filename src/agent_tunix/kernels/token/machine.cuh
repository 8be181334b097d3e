// What the kernel asks of the hardware, in PTX. All else is plain C++, which tests run on a CPU with a machine of their own in
// place of this file; so it is included by its bare name, and is looked for where the compiler is told to.

#pragma once

typedef unsigned short bf16;
typedef unsigned int u32;

// Read anew in every stage, lest all that follows from it be kept through all stages, for want of registers in memory.
int this_thread() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  __builtin_assume(x >= 0 && x < 1024);
  return x;
}

#define SHARED_MEMORY(name) extern __shared__ __align__(128) unsigned char name[]
u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Feeders need few registers, and leave the other warps theirs.
template <int COUNT>
void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int THREADS>
void meet() {
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

u32 pack(float x, float y) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  return pair;
}

// Left: sixteen rows by sixteen inputs. Right: sixteen inputs by eight columns.
void multiply(float4& sum, const uint4& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum.x), "+f"(sum.y), "+f"(sum.z), "+f"(sum.w)
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// Of eight rows of eight, of which a lane has a pair of neighbours, the columns: those of rows 2t and 2t + 1 of column g.
u32 transposed(u32 pair) {
  u32 x;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(x) : "r"(pair));
  return x;
}

// Words and counters in global memory that other blocks look at meanwhile.
void leave(u32* p, u32 x) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory"); }
void leave(u32* p, uint2 x) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(x.x), "r"(x.y) : "memory");
}
void leave(u32* p, float4 x) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}
void look(u32& x, const u32* p) { asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory"); }
void look(uint4& x, const u32* p) {
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p)
               : "memory");
}
void look(int& x, const int* p) { asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory"); }
void count(int* counter) { asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory"); }

// Barriers in shared memory: a phase is over when one thread has arrived and all bytes are there that it said to expect.
void make_barrier(u32 barrier) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier)); }
void barriers_are_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
int is_over(u32 barrier, u32 phase) {
  int done;
  asm volatile("{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.s32 %0, 1, 0, done;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(phase)
               : "memory");
  return done;
}
void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
void arrive_and_expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

void copy_bulk(u32 to, const void* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}
// The second level of cache keeps what it has rather than this.
void copy_bulk_through(u32 to, const void* from, int bytes, u32 barrier) {
  asm volatile("{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
               "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], policy;\n}"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// Into the second level of cache.
void fetch(const void* from, int bytes) { asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes)); }

// Sixteen bytes that no slot is worth; `await_copies` before they are used.
void copy_ahead(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// In this order: when the last has come, all have.
uint4 read_shared(u32 from) {
  uint4 x;
  asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
  return x;
}
