# morphkv_private_flags: warnings and sanitizers of our own targets. Targets link it PRIVATE
# inside $<BUILD_INTERFACE:>, so that nothing of it reaches a user of the library.

add_library(morphkv_private_flags INTERFACE)
target_compile_options(morphkv_private_flags INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wextra-semi
  # g++ 12 sees overlapping copies in "literal" + std::string (its bug 105651).
  $<$<AND:$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-restrict>)

if(MORPHKV_SANITIZE)
  list(JOIN MORPHKV_SANITIZE "," sanitizers)
  set(sanitizer_flags "-fsanitize=${sanitizers}" -fno-sanitize-recover=all)
  target_compile_options(morphkv_private_flags INTERFACE
    ${sanitizer_flags} -fno-omit-frame-pointer)
  target_link_options(morphkv_private_flags INTERFACE ${sanitizer_flags})
endif()
