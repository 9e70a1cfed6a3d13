// Words for lists.
#pragma once

#include <array>
#include <string_view>

namespace morphkv::eval {

inline constexpr std::array<std::string_view, 96> kNouns = {
    "apple",  "arrow",  "badge",   "basin",   "beach",  "bench",  "blade",  "board",  "bottle",
    "branch", "brick",  "brush",   "bucket",  "button", "cabin",  "camel",  "candle", "canvas",
    "carpet", "castle", "chain",   "chair",   "cherry", "clock",  "cloud",  "coin",   "copper",
    "cotton", "crown",  "desert",  "diamond", "door",   "dragon", "drum",   "eagle",  "engine",
    "fabric", "falcon", "feather", "fence",   "field",  "flame",  "flute",  "forest", "fossil",
    "garden", "glass",  "glove",   "hammer",  "hat",    "helmet", "hill",   "horse",  "island",
    "jacket", "jungle", "kettle",  "ladder",  "lake",   "lamp",   "leaf",   "lemon",  "lion",
    "magnet", "marble", "meadow",  "mirror",  "moon",   "needle", "ocean",  "onion",  "orange",
    "panda",  "paper",  "pencil",  "piano",   "pillow", "planet", "pocket", "potato", "rabbit",
    "ribbon", "river",  "rocket",  "saddle",  "sail",   "shadow", "silver", "spoon",  "stone",
    "sugar",  "table",  "tiger",   "tunnel",  "violin", "window"};

}  // namespace morphkv::eval
