// The kernel as a function of arrays: it is run by fibers to its end, and what went wrong is returned, or nothing.

#include <utility>

#include "token.cu"

static void* const* pointers;

template <class... P, size_t... N>
void call(void (*kernel)(P...), std::index_sequence<N...>) {
  static_assert(sizeof...(P) == sizeof...(N), "pointers");
  kernel((P)pointers[N]...);
}
template <class... P>
constexpr int parameters(void (*)(P...)) {
  return sizeof...(P);
}
constexpr int PARAMETERS = parameters(token);

extern "C" __attribute__((visibility("default"))) const char* run(void* const* given, const size_t* bytes, int count,
                                                                  int blocks, int threads, unsigned seed) {
  if (count != PARAMETERS || threads != ALL_THREADS) return "the kernel takes other arguments";
  pointers = given;
  arrays.clear();
  for (int n = 0; n < count; n++) arrays.push_back({(unsigned char*)given[n], bytes[n]});
  std::vector<Machine> grid(blocks);
  for (Machine& block : grid) memset(block.memory.get(), 0xff, SHARED_BYTES);
  run_all(grid, threads, seed, [] { call(token, std::make_index_sequence<PARAMETERS>()); });
  return fault[0] ? fault : nullptr;
}
