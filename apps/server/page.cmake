# morphkv_page: the files of page/ as strings in the binary. Include it from apps/server.

foreach(file index.html page.css page.js page.svg)
  string(REGEX REPLACE ".*\\." "" type "${file}")
  string(TOUPPER "${type}" type)
  file(READ "${CMAKE_CURRENT_LIST_DIR}/page/${file}" MORPHKV_PAGE_${type})
  if(MORPHKV_PAGE_${type} MATCHES "\\)page_file\"")
    message(FATAL_ERROR "page/${file} holds what ends its string in page.cc.in")
  endif()
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    "${CMAKE_CURRENT_LIST_DIR}/page/${file}")
endforeach()
configure_file("${CMAKE_CURRENT_LIST_DIR}/page.cc.in" "${CMAKE_CURRENT_BINARY_DIR}/page.cc" @ONLY)

add_library(morphkv_page STATIC "${CMAKE_CURRENT_BINARY_DIR}/page.cc")
target_include_directories(morphkv_page PUBLIC "${CMAKE_CURRENT_LIST_DIR}")
target_compile_features(morphkv_page PUBLIC cxx_std_20)
target_link_libraries(morphkv_page PRIVATE morphkv_private_flags)
