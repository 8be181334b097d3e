// Threads of a grid as fibers of one process. One runs until it waits; then another of its block does, until the block's
// turn is over and that of some other block comes. Blocks are drawn, and for each turn a warp of theirs that is slow: so
// there is no order in which they always come.

#pragma once
#include <cstddef>
#include <cstdio>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>

constexpr int MOST_THREADS = 512;
constexpr int STACK = (32 << 10) + 576;  // no power of two, lest all stacks compete for the same lines of cache
constexpr int TURN = 1000, SPIN = 40;    // the shortest turn of a block, and what of it is lost by looking in vain
constexpr long PATIENCE = 10'000'000;    // how often fibers may look in vain until they are said to be stuck

// GCC's own, as those of the C library take several times as long.
typedef void* Context[5];

struct Ahead {  // a copy that its fiber has not waited for yet
  unsigned char *to, from[16];
};
struct Fiber {
  Context kept;
  struct Block* block;
  int thread;
  bool begun = false;
  std::vector<Ahead> ahead;
};

// Where so many fibers wait for each other. The last to come does what is to be done for all.
struct Meeting {
  int here = 0, purpose = 0;
  Fiber* who[MOST_THREADS];
};

struct Block {
  int index, living;
  std::vector<Fiber> fibers;
  Fiber* ready[MOST_THREADS];
  unsigned first = 0, after = 0;  // of those that are ready, in a circle
  void push(Fiber* fiber) { ready[after++ % MOST_THREADS] = fiber; }
  Fiber* pop() { return ready[first++ % MOST_THREADS]; }
  bool nobody_is_ready() const { return first == after; }

  int slow = -1;  // a warp that waits as long as others can go on
  std::vector<Fiber*> held;
  void slow_down(int warp) {
    for (Fiber* fiber : held) push(fiber);
    held.clear(), slow = warp;
  }
};

static std::vector<Block*> living;
static Fiber* current;
static int turn;
static long in_vain;
static unsigned char* stacks;
static Context home;
static char fault[256];
static unsigned drawn;
static void (*body)();

static unsigned draw(unsigned below) {
  drawn = drawn * 1664525 + 1013904223;
  return (drawn >> 8) % below;
}

[[noreturn]] __attribute__((noinline)) static void go_to(Context& context) { __builtin_longjmp(context, 1); }
[[noreturn]] static void fail(const char* what) {
  snprintf(fault, sizeof fault, "block %d, thread %d: %s", current->block->index, current->thread, what);
  go_to(home);
}
static void require(bool holds, const char* what) {
  if (!holds) fail(what);
}

static Fiber* next_fiber() {
  Block* block = current->block;
  if (turn <= 0 || block->living == 0) {
    block = living[draw(living.size())], turn = TURN << draw(7);
    block->slow_down(draw(block->fibers.size() / 32));
  }
  for (;;) {
    if (block->nobody_is_ready()) block->slow_down(-1);
    require(!block->nobody_is_ready(), "a block's threads wait for each other in different places");
    Fiber* fiber = block->pop();
    if (fiber->thread / 32 != block->slow) return fiber;
    block->held.push_back(fiber);
  }
}

static void finish();
static void begin_fiber() {
  body();
  finish();
}

[[noreturn]] __attribute__((noinline)) static void enter(Fiber* fiber) {
  current = fiber;
  if (fiber->begun) go_to(fiber->kept);
  fiber->begun = true;
  static ucontext_t fresh;
  getcontext(&fresh);
  fresh.uc_link = nullptr;
  fresh.uc_stack.ss_sp = stacks + ((size_t)fiber->block->index * fiber->block->fibers.size() + fiber->thread) * STACK;
  fresh.uc_stack.ss_size = STACK;
  makecontext(&fresh, begin_fiber, 0);
  setcontext(&fresh);
  __builtin_unreachable();
}

// The current fiber stays away until someone pushes it.
__attribute__((noinline)) static void park() {
  Fiber* next = next_fiber();
  if (next == current) return;
  if (!__builtin_setjmp(current->kept)) enter(next);
}

static void finish() {
  if (--current->block->living == 0)
    for (size_t n = 0; n < living.size(); n++)
      if (living[n] == current->block) living.erase(living.begin() + n--);
  if (living.empty()) go_to(home);
  enter(next_fiber());
}

// What was looked for is not there yet.
static void look_again_later() {
  if (++in_vain > PATIENCE) fail("stuck");
  turn -= SPIN;
  current->block->push(current);
  park();
}
static void something_happened() { in_vain = 0; }

template <class Work>
void meet_at(Meeting& meeting, int count, int purpose, Work work) {
  require(!meeting.here || meeting.purpose == purpose, "threads that should do the same do different things");
  meeting.purpose = purpose;
  meeting.who[meeting.here++] = current;
  turn--;
  if (meeting.here < count) return park();
  work();
  something_happened();
  for (int n = 0; n < count - 1; n++) current->block->push(meeting.who[n]);
  meeting.here = 0;
}

// Runs so many blocks of so many threads until all have finished, or one cannot go on: then `fault` says which and why.
template <class Grid>
void run_all(Grid& blocks, int threads, unsigned seed, void (*what)()) {
  const size_t bytes = (size_t)blocks.size() * threads * STACK;
  stacks = (unsigned char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) return (void)snprintf(fault, sizeof fault, "no memory for stacks");
  madvise(stacks, bytes, MADV_NOHUGEPAGE);  // of most stacks only a page or two is ever used
  living.clear(), fault[0] = 0, drawn = seed, body = what, turn = TURN, in_vain = 0;
  for (size_t n = 0; n < blocks.size(); n++) {
    Block& block = blocks[n];
    block.index = n, block.living = threads;
    block.fibers.resize(threads);
    for (int thread = 0; thread < threads; thread++) {
      Fiber& fiber = block.fibers[thread];
      fiber.block = &block, fiber.thread = thread;
      block.push(&fiber);
    }
    living.push_back(&block);
  }
  if (!__builtin_setjmp(home)) enter(living[0]->pop());
  munmap(stacks, (size_t)blocks.size() * threads * STACK);
}
