// Memory of one thread, aligned to a cache line and freed at the end of its scope.
#ifndef QINDUCTOR_SCRATCH_H
#define QINDUCTOR_SCRATCH_H
#include <cstdint>
#include <memory>
#include <new>

namespace qinductor {

struct AlignedDelete {
  void operator()(void* p) const { ::operator delete(p, std::align_val_t(64)); }
};
template <class T>
using Scratch = std::unique_ptr<T[], AlignedDelete>;
template <class T>
inline Scratch<T> scratch(int64_t count) {
  return Scratch<T>(static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64))));
}

}  // namespace qinductor
#endif
