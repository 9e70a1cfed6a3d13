// Counts what a test binary allocates: replaces its global operator new. To be included once.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<long> g_allocations{0};

void* counted(std::size_t size) noexcept {
  ++g_allocations;
  return std::malloc(std::max<std::size_t>(size, 1));
}

void* counted(std::size_t size, std::align_val_t alignment) noexcept {
  ++g_allocations;
  const auto unit = static_cast<std::size_t>(alignment);
  return std::aligned_alloc(unit, (size + unit - 1) / unit * unit);
}

void* or_throw(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// Not inline, lest the compiler sees a `new` whose memory goes to free().
[[gnu::noinline]] void release(void* memory) noexcept { std::free(memory); }

using Size = std::size_t;
using Align = std::align_val_t;
using NoThrow = std::nothrow_t;

}  // namespace

void* operator new(Size n) { return or_throw(counted(n)); }
void* operator new[](Size n) { return or_throw(counted(n)); }
void* operator new(Size n, Align a) { return or_throw(counted(n, a)); }
void* operator new[](Size n, Align a) { return or_throw(counted(n, a)); }
void* operator new(Size n, const NoThrow&) noexcept { return counted(n); }
void* operator new[](Size n, const NoThrow&) noexcept { return counted(n); }
void* operator new(Size n, Align a, const NoThrow&) noexcept { return counted(n, a); }
void* operator new[](Size n, Align a, const NoThrow&) noexcept { return counted(n, a); }
void operator delete(void* p) noexcept { release(p); }
void operator delete[](void* p) noexcept { release(p); }
void operator delete(void* p, Size) noexcept { release(p); }
void operator delete[](void* p, Size) noexcept { release(p); }
void operator delete(void* p, Align) noexcept { release(p); }
void operator delete[](void* p, Align) noexcept { release(p); }
void operator delete(void* p, Size, Align) noexcept { release(p); }
void operator delete[](void* p, Size, Align) noexcept { release(p); }
void operator delete(void* p, const NoThrow&) noexcept { release(p); }
void operator delete[](void* p, const NoThrow&) noexcept { release(p); }
void operator delete(void* p, Align, const NoThrow&) noexcept { release(p); }
void operator delete[](void* p, Align, const NoThrow&) noexcept { release(p); }
