// Line plots as SVG elements inside a page, whose style sheet gives the colours.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "text.h"

namespace morphkv::eval {

struct Point {
  double rows = 0.0;
  Estimate y;
};

struct Series {
  std::string name;
  int style = 0;  // marker, colour and dashes; the same number looks the same in every plot
  std::vector<Point> points;
};

enum class Scale {
  kShare,     // 0 to 1
  kFromZero,  // 0 to the largest value
  kLog,       // from the least to the largest value
};

struct Plot {
  std::string title;    // also of what a screen reader says
  std::string y_label;  // stands above the axis
  Scale scale = Scale::kShare;
  Form form = Form::kPercent;  // of the values on the y axis
  std::vector<Series> series = {};
  std::optional<double> full = {};  // a dashed line: the full cache
};

// An <svg> with title and description; `id` is unique in the page. Values over the rows kept, on a
// log2 axis, with the intervals as bars; series stand slightly apart, so that bars do not hide each
// other. What is not finite, or not positive on a log scale, is left out.
std::string to_svg(const Plot& plot, const std::string& id);
// The line and marker of a style, for a legend. Of the full cache: -1.
std::string legend_key(int style);
// The rules of the style sheet that both need: light, and dark where that is preferred.
std::string plot_style();

}  // namespace morphkv::eval
