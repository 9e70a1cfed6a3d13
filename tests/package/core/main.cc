// A project that knows only the installed core: public headers and one archive.
#include <morphkv/config.h>
#include <morphkv/version.h>

#include <cstdio>

int main() {
  morphkv::validate(morphkv::CacheConfig{});
  std::printf("morphkv %s\n", morphkv::kVersion);
}
