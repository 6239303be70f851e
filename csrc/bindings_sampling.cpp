// Sampling, as octavo.ops._cpu shows it.
#include "bindings.hpp"
#include "sampling.hpp"

namespace octavo {

void bind_sampling(nb::module_& m) {
  m.def(
      "sample",
      [](Context& c, Array logits, Array temperature, Array top_k, Array top_p, Array min_p, Array uniform,
         ArrayRw tokens) {
        const float* x = in<float>(logits, "logits", {-1, -1});
        const auto n = static_cast<int64_t>(logits.shape(0));
        const size_t vocab = logits.shape(1);
        if (vocab == 0) throw std::invalid_argument("logits: the vocabulary is empty");
        const SampleRows rows{in<double>(temperature, "temperature", {n}), in<int32_t>(top_k, "top_k", {n}),
                              in<double>(top_p, "top_p", {n}), in<double>(min_p, "min_p", {n}),
                              in<double>(uniform, "uniform", {n})};
        int32_t* to = out<int32_t>(tokens, "out", {n});
        run_locked(c, [&] { sample(c, x, static_cast<size_t>(n), vocab, rows, to); });
      },
      nb::arg("context"), nb::arg("logits"), nb::arg("temperature"), nb::arg("top_k"), nb::arg("top_p"),
      nb::arg("min_p"), nb::arg("uniform"), nb::arg("out"),
      "out, int32 [n] = tokens drawn from logits, float32 [n, vocab]; -1 for a row whose logits are not finite. See "
      "octavo.ops.base.Sampling for the parameters, float64 [n] but for top_k, int32 [n].");
}

}  // namespace octavo
