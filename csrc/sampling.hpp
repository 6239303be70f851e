// From logits to tokens: the rows of a step in one call.
#pragma once

#include "context.hpp"

namespace octavo {

/// How each row's token is chosen; arrays of one value per row.
struct SampleRows {
  const double* temperature;  ///< 0: the largest logit, of equal ones the first
  const int32_t* top_k;       ///< 0: all
  const double* top_p;        ///< in (0, 1]
  const double* min_p;        ///< in [0, 1]
  const double* uniform;      ///< in [0, 1), the row's random number
};

/// out[i] = the token drawn from row i of logits [n, vocab]; -1 where a logit is NaN or +inf, or all are -inf.
void sample(Context& context, const float* logits, size_t n, size_t vocab, const SampleRows& rows, int32_t* out);

}  // namespace octavo
