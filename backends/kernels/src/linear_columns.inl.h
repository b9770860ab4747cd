// Registers of a linear layer's output that may reach beyond its last column.
#pragma once

#include <stdint.h>

namespace octavo {
namespace {

// `columns` is how many there are from this register's first lane on, possibly none or less.
template <class V>
typename V::Vec load_columns(const float* from, int64_t columns) {
  if (columns >= V::kLanes) return V::load(from);
  return columns > 0 ? V::load_first(from, static_cast<int>(columns)) : V::set1(0.0f);
}

template <class V>
void store_columns(float* to, typename V::Vec x, int64_t columns) {
  if (columns >= V::kLanes)
    V::store(to, x);
  else if (columns > 0)
    V::store_first(to, x, static_cast<int>(columns));
}

}  // namespace
}  // namespace octavo
