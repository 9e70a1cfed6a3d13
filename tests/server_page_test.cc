#include <fstream>
#include <sstream>
#include <string>

#include "gtest/gtest.h"
#include "page.h"

namespace morphkv::server {
namespace {

std::string file(const std::string& name) {
  std::ifstream in(std::string(MORPHKV_PAGE_FOLDER "/") + name, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  EXPECT_TRUE(in) << name;
  return out.str();
}

TEST(ServerPage, IsInTheBinaryByteForByte) {
  EXPECT_EQ(page_html(), file("index.html"));
  EXPECT_EQ(page_css(), file("page.css"));
  EXPECT_EQ(page_js(), file("page.js"));
  EXPECT_EQ(page_icon(), file("page.svg"));
}

TEST(ServerPage, NeverTurnsTextIntoMarkup) {
  for (const char* word :
       {"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("})
    EXPECT_EQ(page_js().find(word), std::string_view::npos) << word;
}

}  // namespace
}  // namespace morphkv::server
