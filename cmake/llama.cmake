# Defines the target `llama`: a parent project's own, a source tree (MORPHKV_LLAMA_SOURCE), an
# installed package, or the pinned one that scripts/setup builds, in this order.

if(TARGET llama)
  return()
endif()

if(MORPHKV_LLAMA_SOURCE)
  block()
    foreach(part BUILD_TOOLS BUILD_EXAMPLES BUILD_TESTS BUILD_SERVER BUILD_APP OPENSSL SUBPROCESS)
      set(LLAMA_${part} OFF)
    endforeach()
    set(LLAMA_BUILD_COMMON ON)
    set(BUILD_SHARED_LIBS OFF)
    # Our settings for our sources are not meant for llama.cpp's.
    set(CMAKE_COMPILE_WARNING_AS_ERROR OFF)
    set(CMAKE_CXX_CLANG_TIDY "")
    add_subdirectory("${MORPHKV_LLAMA_SOURCE}" "${PROJECT_BINARY_DIR}/llama.cpp"
      EXCLUDE_FROM_ALL SYSTEM)
  endblock()
  return()
endif()

# A package that scripts/setup made is asked for again each time: a build tree may move to
# another CPU with a shared home directory, and the cache may have been deleted.
if(MORPHKV_LLAMA_FROM_SETUP)
  foreach(found llama_DIR llama_LIBRARY ggml_DIR)
    unset(${found} CACHE)
  endforeach()
endif()
find_package(llama CONFIG QUIET)
set(MORPHKV_LLAMA_FROM_SETUP OFF CACHE INTERNAL "llama is the package made by scripts/setup")

if(NOT llama_FOUND)
  execute_process(
    COMMAND "${PROJECT_SOURCE_DIR}/scripts/setup" llama
    OUTPUT_VARIABLE llama_prefix OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE status)
  if(status EQUAL 0)
    set(MORPHKV_LLAMA_FROM_SETUP ON CACHE INTERNAL "llama is the package made by scripts/setup")
    find_package(llama CONFIG QUIET PATHS "${llama_prefix}" NO_DEFAULT_PATH)
  endif()
endif()

if(NOT llama_FOUND)
  message(FATAL_ERROR "morphkv's llama.cpp integration needs llama.cpp. Install its CMake package "
    "(and name its prefix in CMAKE_PREFIX_PATH), or set MORPHKV_LLAMA_SOURCE to a source tree, or "
    "see above why scripts/setup could not build it, or switch MORPHKV_LLAMA_CPP off.")
endif()
message(STATUS "llama.cpp: ${llama_DIR}")
