# Installs the libraries, their headers and the package morphkv: find_package(morphkv) gives
# morphkv::morphkv and, where llama.cpp is found too, morphkv::llama_cpp.

include(CMakePackageConfigHelpers)
set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/morphkv")

install(DIRECTORY include/morphkv "${PROJECT_BINARY_DIR}/include/morphkv"
  DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" FILES_MATCHING PATTERN "*.h")
install(TARGETS morphkv EXPORT morphkvTargets)
install(EXPORT morphkvTargets NAMESPACE morphkv:: DESTINATION "${package_dir}")

# With a llama.cpp from a source tree there is no llama package that a user's project could find.
if(MORPHKV_LLAMA_CPP AND llama_FOUND)
  set(MORPHKV_INSTALL_LLAMA_CPP ON)
  cmake_path(SET llama_prefix NORMALIZE "${llama_DIR}/../../..")  # <prefix>/lib/cmake/llama
  # Chat templates stay with the tool: a user's llama.cpp package has no library common.
  install(DIRECTORY integrations/llama_cpp/include/morphkv
    DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" FILES_MATCHING PATTERN "*.h"
    PATTERN chat_template.h EXCLUDE)
  install(TARGETS morphkv_llama EXPORT morphkvLlamaTargets)
  install(EXPORT morphkvLlamaTargets NAMESPACE morphkv:: DESTINATION "${package_dir}")
endif()
if(MORPHKV_BUILD_CLI)
  install(TARGETS morphkv_cli)
endif()

configure_package_config_file(cmake/morphkvConfig.cmake.in morphkvConfig.cmake
  INSTALL_DESTINATION "${package_dir}")
write_basic_package_version_file(morphkvConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  "${CMAKE_CURRENT_BINARY_DIR}/morphkvConfig.cmake"
  "${CMAKE_CURRENT_BINARY_DIR}/morphkvConfigVersion.cmake"
  DESTINATION "${package_dir}")
install(FILES LICENSE THIRD_PARTY_NOTICES.md DESTINATION "${CMAKE_INSTALL_DOCDIR}")
