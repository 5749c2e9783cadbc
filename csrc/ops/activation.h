// The activations of the feed-forward layer, by name.
#pragma once

namespace embert {

enum class Activation : int { kNone = 0, kGeluErf = 1, kGeluTanh = 2, kRelu = 3, kSilu = 4 };

}  // namespace embert
