// Linear layers, embedding, MLP and head for octavo.ops._cpu.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bindings_stored.hpp"
#include "blocks.hpp"

namespace octavo {
namespace {

std::vector<TensorView> views(const std::vector<const Stored*>& stored) {
  std::vector<TensorView> result;
  for (const Stored* s : stored) result.push_back(s->view);
  return result;
}

}  // namespace

void bind_linear(nb::module_& m) {
  nb::class_<Stored>(m, "Stored", "A matrix as GGUF stores it: bytes of `rows` rows of `cols` values.")
      .def(
          "__init__",
          [](Stored* self, const std::string& name, const std::string& dtype, int64_t rows, int64_t cols, Array data,
             std::optional<Array> row_order) {
            if (rows < 1 || cols < 1) throw std::invalid_argument("tensor " + name + ": rows and cols must be positive");
            TensorView view{name, parse_tensor_type(dtype, name), static_cast<size_t>(rows), static_cast<size_t>(cols),
                            in<uint8_t>(data, "data", {-1}), data.shape(0)};
            if (row_order) view.row_order = in<int32_t>(*row_order, "row_order", {rows});
            new (self) Stored{view, data, row_order};
          },
          nb::arg("name"), nb::arg("dtype"), nb::arg("rows"), nb::arg("cols"), nb::arg("data"),
          nb::arg("row_order").none() = nb::none());

  nb::class_<Linear>(m, "Linear", "Stacked matrices in kernel order.")
      .def(
          "__init__",
          [](Linear* self, Context& c, const std::vector<const Stored*>& stack, std::optional<Array> bias) {
            const std::vector<TensorView> pieces = views(stack);
            const std::span<const float> b = bias ? vector_in(*bias, "bias") : std::span<const float>{};
            run_locked(c, [&] { new (self) Linear(c, pieces, b); });
          },
          nb::arg("context"), nb::arg("stack"), nb::arg("bias").none() = nb::none())
      .def_prop_ro("rows", &Linear::rows)
      .def_prop_ro("cols", &Linear::cols)
      .def_prop_ro("packed_bytes", &Linear::packed_bytes);
  m.def(
      "linear",
      [](Context& c, const Linear& w, Array x, ArrayRw y, std::optional<Array> norm, float eps, bool add) {
        const int64_t cols = static_cast<int64_t>(w.cols()), rows = static_cast<int64_t>(w.rows());
        const float* px = in<float>(x, "x", {-1, cols});
        const size_t n = x.shape(0);
        float* py = out<float>(y, "out", {static_cast<int64_t>(n), rows});
        const Norm before{norm ? in<float>(*norm, "norm", {cols}) : nullptr, eps};
        run_locked(c, [&] {
          const ActRows input = linear_input(c, w, px, w.cols(), n, norm ? &before : nullptr);
          linear_forward(c, w, input, n, py, w.rows(), add);
        });
      },
      nb::arg("context"), nb::arg("weight"), nb::arg("x"), nb::arg("out"), nb::arg("norm").none() = nb::none(),
      nb::arg("eps") = 0.0f, nb::arg("add") = false,
      "out[n, rows] (+)= norm(x)[n, cols] W^T + bias. float32; norm is the weight of an RMSNorm or None.");
  m.def(
      "quantize_rows",
      [](Context& c, Array x, ArrayRw codes, ArrayRw scales) {
        const float* px = in<float>(x, "x", {-1, -1});
        const int64_t n = static_cast<int64_t>(x.shape(0)), cols = static_cast<int64_t>(x.shape(1));
        if (cols % static_cast<int64_t>(kGroup) != 0) throw std::invalid_argument("x: columns must be a multiple of 32");
        const int64_t groups = cols / static_cast<int64_t>(kGroup);
        int16_t* pc = out<int16_t>(codes, "codes", {n, cols});
        float* ps = out<float>(scales, "scales", {n, groups});
        run_locked(c, [&] {
          std::vector<ActGroup> row(static_cast<size_t>(groups));
          for (int64_t i = 0; i < n; ++i) {
            c.kernels.linear.quantize_row(px + i * cols, static_cast<size_t>(cols), row.data());
            for (int64_t g = 0; g < groups; ++g) {
              const ActGroup& group = row[static_cast<size_t>(g)];
              int16_t* to = pc + i * cols + g * static_cast<int64_t>(kGroup);
              for (int k = 0; k < static_cast<int>(kGroup); ++k) to[k] = group.q[(k & ~3) | ((k & 1) << 1) | ((k & 2) >> 1)];
              ps[i * groups + g] = group.d;
            }
          }
        });
      },
      nb::arg("context"), nb::arg("x"), nb::arg("codes"), nb::arg("scales"),
      "The 16-bit activations that quantized layers compute with: x ~ scales * codes in groups of 32. codes int16 [n, cols], "
      "scales float32 [n, cols / 32].");

  nb::class_<Embedding>(m, "Embedding", "Rows of a stored table, dequantized on lookup.")
      .def(
          "__init__",
          [](Embedding* self, Context& c, const Stored& table) {
            run_locked(c, [&] { new (self) Embedding(c, table.view); });
          },
          nb::arg("context"), nb::arg("table"), nb::keep_alive<1, 3>())
      .def(
          "lookup",
          [](const Embedding& self, Context& c, Array tokens, ArrayRw y) {
            const int32_t* t = in<int32_t>(tokens, "tokens", {-1});
            const size_t n = tokens.shape(0);
            float* py = out<float>(y, "out", {static_cast<int64_t>(n), static_cast<int64_t>(self.cols())});
            run_locked(c, [&] { self.lookup(c, t, n, py); });
          },
          nb::arg("context"), nb::arg("tokens"), nb::arg("out"), "out[n, cols] = rows of tokens, int32 [n].");

  nb::class_<Mlp>(m, "Mlp", "RMSNorm, SiLU-gated MLP, residual.")
      .def(
          "__init__",
          [](Mlp* self, Context& c, Array norm, float eps, const Stored& gate, const Stored& up, const Stored& down) {
            const std::span<const float> w = vector_in(norm, "norm");
            run_locked(c, [&] { new (self) Mlp(c, w, eps, gate.view, up.view, down.view); });
          },
          nb::arg("context"), nb::arg("norm"), nb::arg("eps"), nb::arg("gate"), nb::arg("up"), nb::arg("down"))
      .def_prop_ro("packed_bytes", &Mlp::packed_bytes)
      .def(
          "run",
          [](const Mlp& self, Context& c, ArrayRw hidden) {
            float* h = out<float>(hidden, "hidden", {-1, static_cast<int64_t>(self.cols())});
            const size_t n = hidden.shape(0);
            run_locked(c, [&] { self.run(c, h, n); });
          },
          nb::arg("context"), nb::arg("hidden"), "hidden[n, d_model] += down(silu(gate x) * up x), x = norm(hidden).");

  nb::class_<Head>(m, "Head", "RMSNorm and output projection of chosen rows.")
      .def(
          "__init__",
          [](Head* self, Context& c, Array norm, float eps, const Stored& weight) {
            const std::span<const float> w = vector_in(norm, "norm");
            run_locked(c, [&] { new (self) Head(c, w, eps, weight.view); });
          },
          nb::arg("context"), nb::arg("norm"), nb::arg("eps"), nb::arg("weight"))
      .def_prop_ro("rows", &Head::rows)
      .def_prop_ro("packed_bytes", &Head::packed_bytes)
      .def(
          "run",
          [](const Head& self, Context& c, Array hidden, Array rows, ArrayRw y) {
            const float* h = in<float>(hidden, "hidden", {-1, static_cast<int64_t>(self.cols())});
            const int32_t* r = in<int32_t>(rows, "rows", {-1});
            const size_t n = rows.shape(0), hidden_rows = hidden.shape(0);
            float* py = out<float>(y, "out", {static_cast<int64_t>(n), static_cast<int64_t>(self.rows())});
            run_locked(c, [&] { self.run(c, h, hidden_rows, r, n, py); });
          },
          nb::arg("context"), nb::arg("hidden"), nb::arg("rows"), nb::arg("out"),
          "out[n, vocabulary] = logits of hidden[rows], int32 [n].");

  m.def(
      "log_softmax",
      [](Context& c, Array x, ArrayRw y) {
        const float* px = in<float>(x, "x", {-1, -1});
        const size_t n = x.shape(0), cols = x.shape(1);
        float* py = out<float>(y, "out", {static_cast<int64_t>(n), static_cast<int64_t>(cols)});
        run_locked(c, [&] { log_softmax(c, px, n, cols, py); });
      },
      nb::arg("context"), nb::arg("x"), nb::arg("out"), "out = log_softmax(x) over the last axis, float32 [n, cols].");
}

}  // namespace octavo
