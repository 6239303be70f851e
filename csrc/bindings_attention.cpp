// Python bindings of the page codecs and of the attention block.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "attention_block.hpp"
#include "bindings_stored.hpp"
#include "codecs_plane.hpp"

namespace octavo {
namespace {

Coding coding_of(int codec, bool is_key, bool rotated) {
  if (codec < 0 || codec >= kCodecs) throw std::invalid_argument("no codec has the kernel id " + std::to_string(codec));
  return {static_cast<CodecId>(codec), is_key ? Role::key : Role::value, rotated};
}

/// A step and the arrays that it refers to.
struct StepHolder {
  Step step;
  ArrayRw memory;
  Array cosine, sine;
};

using PlaneEntry = std::tuple<int, bool, size_t>;  // codec, rotated, offset

LayerPlanes layer_planes(const PlaneEntry& key, const PlaneEntry& value) {
  return {coding_of(std::get<0>(key), true, std::get<1>(key)), coding_of(std::get<0>(value), false, std::get<1>(value)),
          std::get<2>(key), std::get<2>(value)};
}

PageLayout page_layout(const std::vector<PlaneEntry>& keys, const std::vector<PlaneEntry>& values, size_t page_bytes) {
  if (keys.size() != values.size()) throw std::invalid_argument("as many key planes as value planes are needed");
  PageLayout layout;
  layout.page_bytes = page_bytes;
  for (size_t i = 0; i < keys.size(); ++i) layout.layers.push_back(layer_planes(keys[i], values[i]));
  return layout;
}

const float* optional_norm(const std::optional<Array>& norm, const char* name, size_t head_dim) {
  return norm ? in<float>(*norm, name, {static_cast<int64_t>(head_dim)}) : nullptr;
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<CacheLayout>(m, "CacheLayout", "The page formats that the layers of a cache group share.")
      .def(
          "__init__",
          [](CacheLayout* self, const Context& context, size_t page_size, size_t n_kv_heads, size_t head_dim,
             size_t group, size_t split_pages, const std::vector<PlaneEntry>& keys,
             const std::vector<PlaneEntry>& values, size_t page_bytes) {
            CacheLayout cache;
            cache.shape = {{page_size, n_kv_heads, head_dim}, group, split_pages};
            check_cache(cache);
            cache.open = page_layout(keys, values, page_bytes);
            check_layout(cache, context.kernels, cache.open);
            for (const LayerPlanes& planes : cache.open.layers)
              if (planes.key.codec != CodecId::f32 || planes.value.codec != CodecId::f32)
                throw std::invalid_argument("open pages are written by the f32 codec");
            new (self) CacheLayout(std::move(cache));
          },
          nb::arg("context"), nb::arg("page_size"), nb::arg("n_kv_heads"), nb::arg("head_dim"), nb::arg("group"),
          nb::arg("split_pages"), nb::arg("keys"), nb::arg("values"), nb::arg("page_bytes"),
          "keys, values: the open format's planes, (codec's kernel_id, rotated, offset) of each layer.")
      .def(
          "add_format",
          [](CacheLayout& self, const Context& context, const std::vector<PlaneEntry>& keys,
             const std::vector<PlaneEntry>& values, size_t page_bytes) {
            return add_format(self, context.kernels, page_layout(keys, values, page_bytes));
          },
          nb::arg("context"), nb::arg("keys"), nb::arg("values"), nb::arg("page_bytes"),
          "Register a sealed form; returns its id. Not while a Step is in use.");

  nb::class_<StepHolder>(m, "Step", "A batch, checked and cut into work; for all layers of one step, then for the next.")
      .def(
          "__init__",
          [](StepHolder* self, const CacheLayout& cache, size_t partial_bytes) {
            new (self) StepHolder{Step(cache, partial_bytes), {}, {}, {}};
          },
          nb::arg("cache"), nb::arg("partial_bytes") = kPartialBytes, nb::keep_alive<1, 2>(),
          "partial_bytes: the most that partial results of splits may take; beyond it fewer sequences share splits.")
      .def(
          "assign",
          [](StepHolder& self, const Context& context, ArrayRw memory, Array row_start, Array position,
             Array first_list, Array entry_start, Array page_offset, Array page_format, Array entry_position,
             Array n_tokens, Array open_offset, Array cosine, Array sine) {
            BatchView batch{};
            batch.memory = out<uint8_t>(memory, "memory", {-1});
            batch.memory_bytes = memory.shape(0);
            batch.position = in<int32_t>(position, "position", {-1});
            const int64_t segments = static_cast<int64_t>(position.shape(0));
            batch.n_segments = position.shape(0);
            batch.row_start = in<int32_t>(row_start, "row_start", {segments + 1});
            batch.n_rows = static_cast<size_t>(std::max<int32_t>(0, batch.row_start[segments]));
            batch.first_list = in<int32_t>(first_list, "first_list", {segments + 1});
            batch.n_lists = static_cast<size_t>(std::max<int32_t>(0, batch.first_list[segments]));
            batch.entry_start = in<int32_t>(entry_start, "entry_start", {static_cast<int64_t>(batch.n_lists) + 1});
            batch.page_offset = in<int64_t>(page_offset, "page_offset", {-1});
            batch.n_entries = page_offset.shape(0);
            const int64_t entries = static_cast<int64_t>(batch.n_entries);
            batch.page_format = in<uint8_t>(page_format, "page_format", {entries});
            batch.entry_position = in<int32_t>(entry_position, "entry_position", {entries});
            batch.n_tokens = in<int32_t>(n_tokens, "n_tokens", {entries});
            batch.open_offset = in<int64_t>(open_offset, "open_offset", {segments});
            RopeTable rope{};
            rope.cosine = in<float>(cosine, "cosine", {-1, -1});
            rope.n_positions = cosine.shape(0);
            rope.dim = 2 * cosine.shape(1);
            rope.sine = in<float>(sine, "sine",
                                  {static_cast<int64_t>(cosine.shape(0)), static_cast<int64_t>(cosine.shape(1))});
            self.step.assign(batch, rope, context.pool.threads());
            self.memory = memory;
            self.cosine = cosine;
            self.sine = sine;
          },
          nb::arg("context"), nb::arg("memory"), nb::arg("row_start"), nb::arg("position"), nb::arg("first_list"),
          nb::arg("entry_start"), nb::arg("page_offset"), nb::arg("page_format"), nb::arg("entry_position"),
          nb::arg("n_tokens"), nb::arg("open_offset"), nb::arg("cosine"), nb::arg("sine"),
          "Arrays as in octavo.ops.base.Batch and GroupEntries; cosine and sine float32 [positions, rotary dimension / "
          "2]. Raises ValueError where they contradict each other, break a rule for lists or reach outside memory.")
      .def("restore", [](const StepHolder& self) { self.step.restore(); },
           "Put back what open pages held before the step, in every layer that has run.")
      .def(
          "clear",
          [](StepHolder& self) {
            // The arrays go last: until then the step points into them.
            self.step = self.step.empty();
            self.memory = {};
            self.cosine = {};
            self.sine = {};
          },
          "Let go of the batch and of the arrays that it lies in. Not while a block runs.")
      .def_prop_ro("n_rows", [](const StepHolder& self) { return self.step.n_rows(); })
      .def_prop_ro("page_reads", [](const StepHolder& self) { return self.step.page_reads(); },
                   "Sealed pages that one KV head reads in one layer, counted as often as they are read. Where lists "
                   "differ: the first head in the first layer.")
      .def_prop_ro("cascade_refused", [](const StepHolder& self) { return self.step.cascade_refused(); },
                   "Tiles (rows that are attended together) that would have shared splits, but were run alone because "
                   "partial results of all would have passed partial_bytes.");

  nb::class_<AttentionBlock>(m, "AttentionBlock", "One layer's attention, from norm to residual add.")
      .def(
          "__init__",
          [](AttentionBlock* self, Context& context, const CacheLayout& cache, size_t layer, size_t model_layer,
             float eps, float softmax_scale, Array norm, const Stored& q, const Stored& k, const Stored& v, const Stored& o,
             std::optional<Array> bias, std::optional<Array> q_norm, std::optional<Array> k_norm) {
            const auto vector = [](const std::optional<Array>& a, const char* name) {
              return a ? vector_in(*a, name) : std::span<const float>{};
            };
            const std::span<const float> n = vector_in(norm, "norm"), b = vector(bias, "bias");
            const std::span<const float> qn = vector(q_norm, "q_norm"), kn = vector(k_norm, "k_norm");
            run_locked(context, [&] {
              new (self) AttentionBlock(context, cache, layer, model_layer, eps, softmax_scale, n, q.view, k.view, v.view,
                                        o.view, b, qn, kn);
            });
          },
          nb::arg("context"), nb::arg("cache"), nb::arg("layer"), nb::arg("model_layer"), nb::arg("eps"),
          nb::arg("softmax_scale"), nb::arg("norm"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("o"),
          nb::arg("bias").none() = nb::none(), nb::arg("q_norm").none() = nb::none(),
          nb::arg("k_norm").none() = nb::none(), nb::keep_alive<1, 3>(),
          "layer: within the cache's group; model_layer: its number in errors. bias: of q, k and v in a row. q_norm, "
          "k_norm: RMSNorm weights of each head, float32 [head_dim].")
      .def_prop_ro("packed_bytes", &AttentionBlock::packed_bytes)
      .def(
          "run",
          [](const AttentionBlock& self, Context& context, const StepHolder& holder, ArrayRw hidden) {
            float* h = out<float>(hidden, "hidden", {static_cast<int64_t>(holder.step.n_rows()),
                                                     static_cast<int64_t>(self.cols())});
            run_locked(context, [&] { self.run(context, holder.step, h); });
          },
          nb::arg("context"), nb::arg("step"), nb::arg("hidden"),
          "hidden, float32 [n, d_model], += the block's output. Raises CodecRangeError where a page cannot be sealed.");

  m.def(
      "attend",
      [](Context& context, const StepHolder& holder, size_t layer, float softmax_scale, Array qkv, ArrayRw y,
         std::optional<Array> q_norm, std::optional<Array> k_norm, float norm_eps) {
        const CacheLayout& cache = holder.step.cache();
        const size_t d = cache.shape.plane.head_dim, heads = cache.shape.plane.n_heads, group = cache.shape.group;
        if (layer >= cache.open.layers.size()) throw std::invalid_argument("no layer " + std::to_string(layer));
        const int64_t n = static_cast<int64_t>(holder.step.n_rows());
        const float* px = in<float>(qkv, "qkv", {n, static_cast<int64_t>((group + 2) * heads * d)});
        float* py = out<float>(y, "out", {n, static_cast<int64_t>(group * heads * d)});
        const AttentionParameters parameters{layer, layer, norm_eps, softmax_scale, optional_norm(q_norm, "q_norm", d),
                                             optional_norm(k_norm, "k_norm", d)};
        run_locked(context, [&] { attend(context, holder.step, parameters, px, py); });
      },
      nb::arg("context"), nb::arg("step"), nb::arg("layer"), nb::arg("softmax_scale"), nb::arg("qkv"), nb::arg("out"),
      nb::arg("q_norm").none() = nb::none(), nb::arg("k_norm").none() = nb::none(), nb::arg("norm_eps") = 0.0f,
      "Attention alone: projected rows float32 [n, (n_heads + 2 n_kv_heads) head_dim] -> float32 [n, n_heads "
      "head_dim].");
}

void bind_codecs(nb::module_& m) {
  m.def(
      "encode_plane",
      [](Context& context, int codec, bool is_key, bool rotated, Array x, ArrayRw plane) {
        const Coding coding = coding_of(codec, is_key, rotated);
        const float* values = in<float>(x, "x", {-1, -1, -1});
        const PlaneShape shape{x.shape(0), x.shape(1), x.shape(2)};
        check_shape(shape);
        const size_t bytes = context.kernels.codecs.plane_bytes(shape, coding);
        uint8_t* to = out<uint8_t>(plane, "plane", {static_cast<int64_t>(bytes)});
        run_locked(context, [&] { encode_plane(context, shape, coding, values, to); });
      },
      nb::arg("context"), nb::arg("codec"), nb::arg("is_key"), nb::arg("rotated"), nb::arg("x"), nb::arg("plane"),
      "Encode x, float32 [page_size, n_heads, head_dim], into plane, uint8 [bytes_per_page], as octavo.codecs does.");
  m.def(
      "decode_plane",
      [](Context& context, int codec, bool is_key, bool rotated, Array plane, ArrayRw x) {
        const Coding coding = coding_of(codec, is_key, rotated);
        float* values = out<float>(x, "x", {-1, -1, -1});
        const PlaneShape shape{x.shape(0), x.shape(1), x.shape(2)};
        check_shape(shape);
        const size_t bytes = context.kernels.codecs.plane_bytes(shape, coding);
        const uint8_t* from = in<uint8_t>(plane, "plane", {static_cast<int64_t>(bytes)});
        run_locked(context, [&] { decode_plane(context, shape, coding, from, values); });
      },
      nb::arg("context"), nb::arg("codec"), nb::arg("is_key"), nb::arg("rotated"), nb::arg("plane"), nb::arg("x"),
      "Decode plane, uint8 [bytes_per_page], into x, float32 [page_size, n_heads, head_dim], in the plain basis.");
}

}  // namespace octavo
