# Defines morphkv::llama_common (llama.cpp's library common, for chat templates) and
# morphkv::httplib (the cpp-httplib that llama.cpp brings along) where they come with the target
# `llama`: from its source tree, or from a package that scripts/setup made. Only the tool and the
# benchmarks need them; a llama.cpp package that others made has neither.

block()
  find_package(Threads REQUIRED)
  if(TARGET llama-common AND TARGET cpp-httplib)
    get_target_property(httplib_dir cpp-httplib SOURCE_DIR)
    add_library(morphkv_httplib INTERFACE)
    target_include_directories(morphkv_httplib SYSTEM INTERFACE "${httplib_dir}")
    target_link_libraries(morphkv_httplib INTERFACE cpp-httplib Threads::Threads)
    add_library(morphkv::httplib ALIAS morphkv_httplib)
    add_library(morphkv::llama_common ALIAS llama-common)
  elseif(llama_FOUND)
    cmake_path(SET prefix NORMALIZE "${llama_DIR}/../../..")  # <prefix>/lib/cmake/llama
    if(EXISTS "${prefix}/include/llama-common/chat.h")
      add_library(morphkv::httplib STATIC IMPORTED)
      set_target_properties(morphkv::httplib PROPERTIES
        IMPORTED_LOCATION "${prefix}/lib/libcpp-httplib.a"
        INTERFACE_INCLUDE_DIRECTORIES "${prefix}/include/llama-vendor"
        INTERFACE_LINK_LIBRARIES Threads::Threads)
      add_library(morphkv::llama_common STATIC IMPORTED)
      set_target_properties(morphkv::llama_common PROPERTIES
        IMPORTED_LOCATION "${prefix}/lib/libllama-common.a"
        INTERFACE_INCLUDE_DIRECTORIES "${prefix}/include/llama-common"
        INTERFACE_LINK_LIBRARIES
          "${prefix}/lib/libllama-common-base.a;$<LINK_ONLY:morphkv::httplib>;llama")
    endif()
  endif()
endblock()

if(NOT TARGET morphkv::llama_common
    AND (MORPHKV_BUILD_CLI OR MORPHKV_BUILD_BENCH OR MORPHKV_BUILD_PYTHON))
  set(found "${llama_DIR}")
  foreach(variable llama_DIR llama_LIBRARY ggml_DIR)  # so that the next try looks again
    unset(${variable} CACHE)
  endforeach()
  message(FATAL_ERROR "morphkv's tool and benchmarks need llama.cpp with its library common, which "
    "the llama.cpp found does not have: ${found}. Take its prefix out of CMAKE_PREFIX_PATH, or "
    "configure with -DCMAKE_PREFIX_PATH=\"$(scripts/setup llama)\", which builds one, or set "
    "MORPHKV_LLAMA_SOURCE to a source tree, or switch MORPHKV_BUILD_CLI and MORPHKV_BUILD_BENCH "
    "off.")
endif()
