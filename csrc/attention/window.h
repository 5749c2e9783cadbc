// Local attention: which keys a query attends to. Queries and keys are counted from their text's start.
#pragma once

#include <cuda_runtime_api.h>

namespace embert {

constexpr int kEveryKey = 1 << 24;  // a side of a window that ends with the text

struct KeyWindow {
  int before, after;  // keys on each side of a query's own

  __host__ __device__ inline bool hides(int query, int key) const {
    return query - key > before || key - query > after;
  }
  // Steps have `keys` keys each. The first step that no query up to `last` needs, in a text with `length` keys,
  __host__ __device__ inline int end_step(int last, int length, int keys) const {
    const int end = last + after + 1 < length ? last + after + 1 : length;
    return (end + keys - 1) / keys;
  }
  // and the first step that a query from `query` on needs, before that one; the last step if it attends to no key.
  __host__ __device__ inline int first_step(int query, int end_step, int keys) const {
    const int first = query > before ? (query - before) / keys : 0;
    return first < end_step ? first : end_step - 1;
  }
  // True if each of `queries` queries attends to all of `keys` keys.
  __host__ __device__ inline bool sees_all(int query, int queries, int key, int keys) const {
    return !hides(query + queries - 1, key) && !hides(query, key + keys - 1) && !hides(query, key) &&
           !hides(query + queries - 1, key + keys - 1);
  }
  // A query attends to the keys of its text for which `place`, as an unsigned number, is below `count`: one comparison
  // for both ends of the window and of the text.
  __host__ __device__ inline int place(int query, int key) const { return key - query + before; }
  __host__ __device__ inline int count(int query, int length) const {
    const int left = length - 1 - query, all = before + (left < after ? left : after) + 1;
    return all > 0 ? all : 0;
  }
  // True if a query attends to a key. One far behind the text's keys does not, and its context is 0.
  __host__ __device__ inline bool sees_any(int query, int length) const { return query - before < length; }
};

// A window of `size` keys on each side, 0: of all. Of causal attention it has only the side before a query.
inline KeyWindow window_of(int size, bool causal) {
  const int before = size > 0 ? size : kEveryKey;
  return {before, causal ? 0 : before};
}

}  // namespace embert
