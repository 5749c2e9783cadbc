// Prints which kernel and tile products get. For every case (out, in, kind, num_sms) of the arguments, where kind is
// 1 with a residual, 2 for products that turn or gate, 3 and 4 for those of 8 bits without and with a residual: a line
// of "from kernel rows columns" for each number of rows, 1 to 32 768, from which on the choice is another one, then an
// empty line.
#include "gemm/heuristics.h"

#include <cstdio>
#include <cstdlib>

using namespace embert::sm90;

int main(int count, char** arguments) {
  for (int at = 1; at + 3 < count; at += 4) {
    const int out = std::atoi(arguments[at]), in = std::atoi(arguments[at + 1]);
    const int kind = std::atoi(arguments[at + 2]);
    GemmConfig before{GemmKernel::kSmallM, 0, 0};
    for (int rows = 1; rows <= 32768; ++rows) {
      const int num_sms = std::atoi(arguments[at + 3]);
      const GemmConfig tile = kind >= 3 ? choose_int8_config({rows, out, in, kind == 4}, num_sms)
                                        : choose_config({rows, out, in, kind == 1, kind == 2}, num_sms);
      if (tile.kernel == before.kernel && tile.rows == before.rows && tile.columns == before.columns) continue;
      std::printf("%d %d %d %d\n", rows, int(tile.kernel), tile.rows, tile.columns);
      before = tile;
    }
    std::printf("\n");
  }
  return 0;
}
