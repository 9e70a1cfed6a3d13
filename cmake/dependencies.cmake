# Finds what the enabled parts need; what is missing is named as a Debian package.

function(morphkv_require package debian_package)
  find_package(${package} CONFIG QUIET)
  if(NOT ${package}_FOUND)
    message(FATAL_ERROR "morphkv needs ${package}: install the Debian package ${debian_package}, "
      "or run `make build`, which installs everything that is missing.")
  endif()
endfunction()

morphkv_require(hwy libhwy-dev)
if(MORPHKV_BUILD_CLI OR MORPHKV_BUILD_BENCH)
  morphkv_require(CLI11 libcli11-dev)
  morphkv_require(nlohmann_json nlohmann-json3-dev)
endif()
if(MORPHKV_BUILD_CLI)
  find_library(MORPHKV_LIBEDIT edit)
  if(NOT MORPHKV_LIBEDIT)
    message(FATAL_ERROR "morphkv needs libedit: install the Debian package libedit-dev, "
      "or run `make build`, which installs everything that is missing.")
  endif()
endif()
if(MORPHKV_BUILD_TESTS)
  morphkv_require(GTest libgtest-dev)
endif()
if(MORPHKV_LLAMA_CPP)
  include(llama)
  include(llama_common)
endif()
