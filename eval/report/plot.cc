#include "plot.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>

namespace morphkv::eval {
namespace {

// In units of the view box.
constexpr double kWidth = 460;
constexpr double kHeight = 300;
constexpr double kLeft = 50;
constexpr double kRight = kWidth - 14;
constexpr double kTop = 28;
constexpr double kBottom = kHeight - 44;
constexpr double kMarker = 3.6;  // radius
constexpr double kCap = 2.5;     // half width of a bar's ends
constexpr double kMargin = 0.5;  // beside the first and last point, in log2 of rows

constexpr int kMarkers = 8;
constexpr std::array<const char*, kMarkers> kLight = {"#1f6fb4", "#c2410c", "#2b7a3e", "#8b3fa8",
                                                      "#866000", "#0b757f", "#b3306b", "#5c5c5c"};
constexpr std::array<const char*, kMarkers> kDark = {"#6db3f2", "#ff9a66", "#6fcf87", "#cf9bea",
                                                     "#e0b84c", "#5ccfd6", "#f58bb8", "#b8b8b8"};
constexpr std::array<const char*, 3> kDashes = {"", "6 3", "1.5 3"};
constexpr const char* kFullDash = "10 5";

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", value);
  return text;
}

std::string line(double x1, double y1, double x2, double y2, const std::string& more = "") {
  return "<line" + attribute("x1", number(x1)) + attribute("y1", number(y1)) +
         attribute("x2", number(x2)) + attribute("y2", number(y2)) + more + "/>";
}

std::string label(double x, double y, const char* anchor, const std::string& text) {
  return "<text" + attribute("x", number(x)) + attribute("y", number(y)) +
         attribute("text-anchor", anchor) + ">" + escaped(text) + "</text>";
}

// Moves between corners given in units of the marker's radius.
std::string path(double x, double y, const std::vector<std::array<double, 2>>& corners) {
  std::string out = "<path d=\"";
  for (std::size_t i = 0; i < corners.size(); ++i) {
    out += (i == 0 ? "M" : "L") + number(x + kMarker * corners[i][0]) + " " +
           number(y + kMarker * corners[i][1]);
  }
  return out + "Z\"/>";
}

std::string marker(int style, double x, double y) {
  const double r = kMarker;
  switch (style % kMarkers) {
    case 0:
      break;
    case 1:
      return path(x, y, {{-0.9, -0.9}, {0.9, -0.9}, {0.9, 0.9}, {-0.9, 0.9}});
    case 2:
      return path(x, y, {{0, -1.2}, {1.15, 0.8}, {-1.15, 0.8}});
    case 3:
      return path(x, y, {{0, -1.3}, {1.3, 0}, {0, 1.3}, {-1.3, 0}});
    case 4:
      return path(x, y, {{0, 1.2}, {1.15, -0.8}, {-1.15, -0.8}});
    case 5:
      return line(x - r, y - r, x + r, y + r) + line(x - r, y + r, x + r, y - r);
    case 6:
      return line(x - 1.3 * r, y, x + 1.3 * r, y) + line(x, y - 1.3 * r, x, y + 1.3 * r);
    default:
      return "<circle class=\"hollow\"" + attribute("cx", number(x)) + attribute("cy", number(y)) +
             attribute("r", number(r)) + "/>";
  }
  return "<circle" + attribute("cx", number(x)) + attribute("cy", number(y)) +
         attribute("r", number(r)) + "/>";
}

std::string class_of(int style) {
  return attribute("class", "series s" + std::to_string(style % kMarkers));
}

std::string dash_of(int style) {
  const char* dash = kDashes[static_cast<std::size_t>(style / kMarkers) % kDashes.size()];
  return *dash == 0 ? "" : attribute("stroke-dasharray", dash);
}

// --- Axes ----------------------------------------------------------------------------------------

class Axes {
 public:
  explicit Axes(const Plot& plot) : plot_(plot) {
    for (const Series& series : plot.series) {
      for (const Point& point : series.points) {
        if (shows(point)) include(point);
      }
    }
    if (plot.full && shows(*plot.full)) include_y(*plot.full);
    least_rows_ -= kMargin;
    most_rows_ += kMargin;
    fit_y();
  }

  bool shows(double y) const { return std::isfinite(y) && (plot_.scale != Scale::kLog || y > 0); }
  bool shows(const Point& point) const {
    return point.rows > 0 && shows(point.y.mean) && shows(point.y.low) && shows(point.y.high);
  }
  bool is_empty() const { return !(least_rows_ <= most_rows_); }

  double x(double rows) const {
    return kLeft + (kRight - kLeft) * (std::log2(rows) - least_rows_) / (most_rows_ - least_rows_);
  }
  double y(double value) const {
    return kBottom - (kBottom - kTop) * (along(value) - along(low_)) / (along(high_) - along(low_));
  }

  std::vector<double> rows_ticks() const {
    const int first = static_cast<int>(std::ceil(least_rows_));
    const int last = static_cast<int>(std::floor(most_rows_));
    const int step = 1 + (last - first) / 8;
    std::vector<double> ticks;
    for (int tick = first; tick <= last; tick += step) ticks.push_back(std::exp2(tick));
    return ticks;
  }
  std::vector<double> y_ticks() const {
    if (plot_.scale == Scale::kShare) return {0, 0.25, 0.5, 0.75, 1};
    if (plot_.scale == Scale::kLog && high_ > 4 * low_) return log_ticks();
    // A step of 1, 2 or 5 that gives three to seven ticks.
    const double rough = (high_ - low_) / 4;
    const double decade = std::pow(10.0, std::floor(std::log10(rough)));
    const double unit = rough / decade;
    const double step = decade * (unit < 1.5 ? 1 : unit < 3.5 ? 2 : unit < 7.5 ? 5 : 10);
    std::vector<double> ticks;
    for (double i = std::ceil(low_ / step); i * step <= high_ * (1 + 1e-9); ++i) {
      ticks.push_back(i * step);
    }
    return ticks;
  }

 private:
  double along(double value) const { return plot_.scale == Scale::kLog ? std::log(value) : value; }
  void include(const Point& point) {
    least_rows_ = std::min(least_rows_, std::log2(point.rows));
    most_rows_ = std::max(most_rows_, std::log2(point.rows));
    include_y(point.y.low);
    include_y(point.y.high);
  }
  void include_y(double y) {
    low_ = std::min(low_, y);
    high_ = std::max(high_, y);
  }
  void fit_y() {
    if (plot_.scale == Scale::kShare) {
      low_ = 0;
      high_ = 1;
    } else if (plot_.scale == Scale::kFromZero) {
      low_ = 0;
      high_ = high_ > 0 ? 1.08 * high_ : 1;
    } else {
      const double margin = std::max(1.01, std::pow(high_ / low_, 0.06));
      low_ /= margin;
      high_ *= margin;
    }
  }
  // 1, 2 and 5 of each decade, or the decades alone where those would be many.
  std::vector<double> log_ticks() const {
    std::vector<double> ticks;
    const bool many = high_ > 1000 * low_;
    for (double decade = std::pow(10.0, std::floor(std::log10(low_))); decade <= high_;
         decade *= 10) {
      for (const double unit : {1.0, 2.0, 5.0}) {
        const double tick = unit * decade;
        if (tick >= low_ && tick <= high_ && (unit == 1.0 || !many)) ticks.push_back(tick);
      }
    }
    return ticks;
  }

  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const Plot& plot_;
  double least_rows_ = kInfinity;  // log2
  double most_rows_ = -kInfinity;
  double low_ = kInfinity;
  double high_ = -kInfinity;
};

std::string tick_text(double value, Form form) {
  if (form == Form::kPercent) return to_text(value, form);
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", value);
  return text;
}

std::string drawn_axes(const Axes& axes, const Plot& plot) {
  std::string out = "<g class=\"axes\">\n";
  for (const double tick : axes.y_ticks()) {
    const double y = axes.y(tick);
    out += line(kLeft, y, kRight, y) + label(kLeft - 6, y + 4, "end", tick_text(tick, plot.form)) +
           "\n";
  }
  for (const double tick : axes.rows_ticks()) {
    const double x = axes.x(tick);
    out += line(x, kBottom, x, kBottom + 4) +
           label(x, kBottom + 17, "middle", with_commas(std::llround(tick))) + "\n";
  }
  out += label(kLeft - 6, 14, "start", plot.y_label);
  out += label((kLeft + kRight) / 2, kHeight - 8, "middle", "rows kept per KV head (log scale)");
  return out + "\n</g>\n";
}

std::string drawn_full(const Axes& axes, const Plot& plot) {
  if (!plot.full || !axes.shows(*plot.full)) return "";
  const double y = axes.y(*plot.full);
  const double above = y - 5 < kTop + 8 ? y + 14 : y - 5;
  return "<g class=\"full\">" +
         line(kLeft, y, kRight, y, attribute("stroke-dasharray", kFullDash)) +
         label(kLeft + 4, above, "start", "full cache") + "</g>\n";
}

std::string drawn_series(const Axes& axes, const Series& series, double shift) {
  std::string corners;
  std::string marks;
  for (const Point& point : series.points) {
    if (!axes.shows(point)) continue;
    const double x = axes.x(point.rows) + shift;
    const double y = axes.y(point.y.mean);
    corners += (corners.empty() ? "" : " ") + number(x) + "," + number(y);
    const double low = axes.y(point.y.low);
    const double high = axes.y(point.y.high);
    if (low - high > 0.5) {
      marks += line(x, low, x, high) + line(x - kCap, low, x + kCap, low) +
               line(x - kCap, high, x + kCap, high);
    }
    marks += marker(series.style, x, y) + "\n";
  }
  return "<g" + class_of(series.style) + ">\n<polyline" + dash_of(series.style) +
         attribute("points", corners) + "/>\n" + marks + "</g>\n";
}

// The values in words.
std::string description_of(const Plot& plot) {
  std::string out = plot.y_label + " against rows kept.";
  if (plot.full) out += " Full cache: " + to_text(*plot.full, plot.form) + ".";
  for (const Series& series : plot.series) {
    out += " " + series.name + ":";
    for (const Point& point : series.points) {
      out += (&point == series.points.data() ? " " : ", ") + to_text(point.y.mean, plot.form) +
             " at " + with_commas(std::llround(point.rows));
    }
    out += ".";
  }
  return out;
}

}  // namespace

std::string to_svg(const Plot& plot, const std::string& id) {
  const Axes axes(plot);
  std::string out = "<svg class=\"plot\" role=\"img\"";
  out += attribute("viewBox", "0 0 " + number(kWidth) + " " + number(kHeight));
  out += attribute("aria-labelledby", id + "-title " + id + "-desc") + ">\n";
  out += "<title" + attribute("id", id + "-title") + ">" + escaped(plot.title) + "</title>\n";
  out +=
      "<desc" + attribute("id", id + "-desc") + ">" + escaped(description_of(plot)) + "</desc>\n";
  if (axes.is_empty()) {
    out += label(kWidth / 2, kHeight / 2, "middle", "not measured");
    return out + "</svg>\n";
  }
  out += drawn_axes(axes, plot) + drawn_full(axes, plot);
  const auto count = static_cast<double>(plot.series.size());
  const double apart = std::min(4.0, 18.0 / count);
  for (std::size_t i = 0; i < plot.series.size(); ++i) {
    out += drawn_series(axes, plot.series[i], apart * (static_cast<double>(i) - (count - 1) / 2));
  }
  return out + "</svg>\n";
}

std::string legend_key(int style) {
  std::string out = "<svg class=\"key\" viewBox=\"0 0 30 12\" aria-hidden=\"true\">";
  if (style < 0) {
    out += "<g class=\"full\">" + line(0, 6, 30, 6, attribute("stroke-dasharray", kFullDash));
  } else {
    out += "<g" + class_of(style) + ">" + line(0, 6, 30, 6, dash_of(style)) + marker(style, 15, 6);
  }
  return out + "</g></svg>";
}

std::string plot_style() {
  std::string light;
  std::string dark;
  for (int i = 0; i < kMarkers; ++i) {
    const std::string rule = ".s" + std::to_string(i) + "{color:";
    light += rule + kLight[static_cast<std::size_t>(i)] + "}\n";
    dark += rule + kDark[static_cast<std::size_t>(i)] + "}\n";
  }
  return light + "@media (prefers-color-scheme:dark){\n" + dark + "}\n" +
         ".plot{display:block;width:100%;height:auto}\n"
         ".plot text{font-size:12px;fill:var(--soft)}\n"
         ".key{width:30px;height:12px;flex:none}\n"
         ".axes line{stroke:var(--grid)}\n"
         ".series,.series *{stroke:currentColor;stroke-width:1.6}\n"
         ".series{fill:currentColor}\n"
         ".series polyline{fill:none}\n"
         ".series .hollow{fill:var(--page)}\n"
         ".full line{stroke:var(--text);stroke-width:1.4}\n"
         ".plot .full text{fill:var(--text)}\n";
}

}  // namespace morphkv::eval
