// The page that the server shows at `/`, as the files of page/ are: for `/`, `/page.css`,
// `/page.js` and `/page.svg`, with these types and this policy.
#pragma once

#include <string_view>

namespace morphkv::server {

std::string_view page_html();  // text/html; charset=utf-8
std::string_view page_css();   // text/css; charset=utf-8
std::string_view page_js();    // text/javascript; charset=utf-8
std::string_view page_icon();  // image/svg+xml

// Content-Security-Policy of all four: the page asks nobody but its own server.
inline constexpr std::string_view kPagePolicy =
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'";

}  // namespace morphkv::server
