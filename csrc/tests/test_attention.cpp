// Codecs and attention over heap blocks of exactly the size they may touch, so that a sanitizer sees any step outside.
// What the numbers should be is tested from Python; here the paths are compared with each other and with a plain loop.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "attention.hpp"
#include "codecs_plane.hpp"
#include "errors.hpp"
#include "test.hpp"

using namespace octavo;
using octavo::test::Random;

namespace {

struct Free {
  void operator()(void* p) const { std::free(p); }
};

/// n values in a block of their own at a 64-byte boundary: the next byte belongs to nobody.
template <class T>
struct Exact {
  explicit Exact(size_t n, int fill = 0xff) : size(n) {
    void* p = nullptr;
    CHECK(posix_memalign(&p, 64, std::max<size_t>(1, n * sizeof(T))) == 0);
    block.reset(p);
    data = static_cast<T*>(p);
    std::memset(p, fill, n * sizeof(T));
  }
  T& operator[](size_t i) { return data[i]; }
  size_t size;
  std::unique_ptr<void, Free> block;
  T* data;
};

const CodecId kAll[] = {CodecId::f32, CodecId::f16, CodecId::bf16, CodecId::int8, CodecId::int4};

bool rotates(CodecId codec, Role role) { return codec == CodecId::int4 && role == Role::value; }

size_t aligned(size_t n) { return (n + 63) / 64 * 64; }

/// Layers' planes one after the other, as octavo.cache.format lays them out.
PageLayout layout(const KernelTable& kernels, const PlaneShape& shape, size_t layers, CodecId key, CodecId value,
                  bool rotate_keys) {
  PageLayout page;
  size_t offset = 0;
  for (size_t i = 0; i < layers; ++i) {
    const Coding keys{key, Role::key, rotate_keys && key == CodecId::int4};
    LayerPlanes planes{keys, {value, Role::value, rotates(value, Role::value)}, 0, 0};
    planes.key_offset = offset;
    offset = aligned(offset + kernels.codecs.plane_bytes(shape, planes.key));
    planes.value_offset = offset;
    offset = aligned(offset + kernels.codecs.plane_bytes(shape, planes.value));
    page.layers.push_back(planes);
  }
  page.page_bytes = offset;
  return page;
}

struct Model {
  Model(Context& c, const AttentionShape& shape, size_t layers) : context(c) {
    cache.shape = shape;
    check_cache(cache);
    cache.open = layout(c.kernels, shape.plane, layers, CodecId::f32, CodecId::f32, false);
    check_layout(cache, c.kernels, cache.open);
    for (size_t i = 0; i < 5; ++i)
      add_format(cache, c.kernels, layout(c.kernels, shape.plane, layers, kAll[i], kAll[(i * 2 + 3) % 5], i % 2 == 0));
    width = (shape.group + 2) * shape.plane.n_heads * shape.plane.head_dim;
    out_width = shape.group * shape.plane.n_heads * shape.plane.head_dim;
  }
  Context& context;
  CacheLayout cache;
  size_t width, out_width;
};

/// A step's arrays, built up segment by segment.
struct Arrays {
  std::vector<int32_t> row_start{0}, position, first_list{0}, entry_start{0}, entry_position, n_tokens;
  std::vector<int64_t> page_offset, open_offset;
  std::vector<uint8_t> page_format;

  void clear() {
    for (auto* v : {&row_start, &first_list, &entry_start}) v->assign(1, 0);
    for (auto* v : {&position, &entry_position, &n_tokens}) v->clear();
    page_offset.clear(), open_offset.clear(), page_format.clear();
  }
  void entry(int64_t offset, size_t format, size_t at, size_t tokens) {
    page_offset.push_back(offset);
    page_format.push_back(static_cast<uint8_t>(format));
    entry_position.push_back(static_cast<int32_t>(at));
    n_tokens.push_back(static_cast<int32_t>(tokens));
  }
  void end_list() { entry_start.push_back(static_cast<int32_t>(page_offset.size())); }
  void end_segment(size_t first, size_t rows, int64_t open) {
    position.push_back(static_cast<int32_t>(first));
    row_start.push_back(row_start.back() + static_cast<int32_t>(rows));
    first_list.push_back(static_cast<int32_t>(entry_start.size()) - 1);
    open_offset.push_back(open);
  }
  BatchView view(uint8_t* memory, size_t bytes) const {
    return {memory, bytes, static_cast<size_t>(row_start.back()), position.size(), entry_start.size() - 1,
            page_offset.size(), row_start.data(), position.data(), first_list.data(), entry_start.data(),
            page_offset.data(), page_format.data(), entry_position.data(), n_tokens.data(), open_offset.data()};
  }
};

/// Runs `tokens` rows in chunks; format of page p is (p * 3 + 1) % 5. Returns the outputs of layer 1.
std::vector<float> run(Model& m, const std::vector<float>& qkv, size_t tokens, const std::vector<size_t>& chunks) {
  const size_t size = m.cache.shape.plane.page_size, half = m.cache.shape.plane.head_dim / 2, pages = tokens / size;
  std::vector<int64_t> offsets;
  std::vector<uint8_t> formats;
  size_t bytes = m.cache.open.page_bytes;  // the open page first, then pages back to front, the last byte a page's
  for (size_t p = 0; p < pages; ++p) formats.push_back(static_cast<uint8_t>((p * 3 + 1) % 5));
  for (size_t p = pages; p-- > 0;) {
    offsets.insert(offsets.begin(), static_cast<int64_t>(bytes));
    bytes += m.cache.formats[formats[p]].page_bytes;
  }
  Exact<uint8_t> memory(bytes);
  Exact<float> cosine(tokens * half), sine(tokens * half);
  for (size_t i = 0; i < tokens * half; ++i) cosine[i] = 0.6f, sine[i] = 0.8f;

  std::vector<float> result(tokens * m.out_width);
  Step step(m.cache);
  size_t done = 0;
  for (const size_t n : chunks) {
    Arrays arrays;
    for (size_t p = 0; p < (done + n) / size; ++p) arrays.entry(offsets[p], formats[p], p * size, size);
    arrays.end_list();
    arrays.end_segment(done, n, 0);
    step.assign(arrays.view(memory.data, bytes), {cosine.data, sine.data, tokens, 2 * half}, m.context.pool.threads());
    for (size_t layer = 0; layer < m.cache.open.layers.size(); ++layer) {
      Exact<float> x(n * m.width), y(n * m.out_width);
      std::memcpy(x.data, qkv.data() + done * m.width, x.size * sizeof(float));
      attend(m.context, step, {layer, layer, 1e-5f, 0.125f, nullptr, nullptr}, x.data, y.data);
      std::memcpy(result.data() + done * m.out_width, y.data, y.size * sizeof(float));
    }
    done += n;
  }
  return result;
}

}  // namespace

TEST(codecs_stay_in_their_plane_and_agree) {
  for (const size_t page_size : {16, 32, 64, 128})
    for (const size_t head_dim : {8, 24, 40, 64, 80, 256})
      for (const CodecId codec : kAll)
        for (const Role role : {Role::key, Role::value})
          for (const bool rotated : {false, true}) {
            const PlaneShape shape{page_size, 3, head_dim};
            const Coding coding{codec, role, rotated};
            Random random(page_size + head_dim);
            std::vector<float> x(page_size * 3 * head_dim);
            for (float& v : x) v = random.heavy();
            std::vector<uint8_t> first;
            for (const char* isa : test::isas()) {
              Context context(1, isa);
              Exact<uint8_t> plane(context.kernels.codecs.plane_bytes(shape, coding));
              encode_plane(context, shape, coding, x.data(), plane.data);
              std::vector<uint8_t> got(plane.data, plane.data + plane.size);
              if (first.empty()) first = got;
              CHECK(got == first, isa << " " << codec_name(codec) << " " << page_size << " " << head_dim);
              Exact<float> y(x.size());
              decode_plane(context, shape, coding, plane.data, y.data);
              for (size_t i = 0; i < x.size(); ++i)
                CHECK(std::abs(y[i] - x[i]) <= 0.8f, isa << " " << y[i] << " " << x[i]);
            }
          }
}

TEST(attention_stays_in_its_pages_whatever_the_chunks) {
  for (const char* isa : test::isas())
    for (const size_t page_size : {16, 32})
      for (const size_t head_dim : {8, 40, 64})
        for (const size_t group : {1, 2, 3, 5}) {
          Context context(group == 3 ? 3 : 1, isa);
          Model model(context, {{page_size, 2, head_dim}, group, 3}, 2);
          const size_t tokens = 7 * page_size + 3;
          Random random(group);
          std::vector<float> qkv(tokens * model.width);
          for (float& v : qkv) v = random.heavy();
          const auto whole = run(model, qkv, tokens, {tokens});
          for (const float v : whole) CHECK(std::isfinite(v));
          const auto parts =
              run(model, qkv, tokens, {5, 1, page_size - 6, 2 * page_size, 1, page_size, 3 * page_size + 1, 1});
          CHECK(std::memcmp(whole.data(), parts.data(), whole.size() * sizeof(float)) == 0, isa << " " << head_dim);
          const auto single = run(model, qkv, tokens, std::vector<size_t>(tokens, 1));
          CHECK(std::memcmp(whole.data(), single.data(), whole.size() * sizeof(float)) == 0, isa << " " << head_dim);
        }
}

TEST(attention_over_shared_pages_equals_each_alone) {
  for (const char* isa : test::isas())
    for (const size_t group : {1, 3}) {
      Context context(2, isa);
      const size_t pages = 18, size = 16, half = 4, mates = 5;
      Model model(context, {{size, 2, 2 * half}, group, 2}, 1);
      std::vector<int64_t> offsets;
      std::vector<uint8_t> formats;
      size_t bytes = mates * model.cache.open.page_bytes;
      for (size_t p = 0; p < pages; ++p) {
        formats.push_back(static_cast<uint8_t>(p % 5));
        offsets.push_back(static_cast<int64_t>(bytes));
        bytes += model.cache.formats[formats[p]].page_bytes;
      }
      Exact<uint8_t> memory(bytes);
      Exact<float> cosine((pages + 1) * size * half, 0), sine((pages + 1) * size * half, 0);
      for (size_t i = 0; i < cosine.size; ++i) cosine[i] = 1.0f;
      const RopeTable rope{cosine.data, sine.data, (pages + 1) * size, 2 * half};
      Random random(group);
      // Segments of one row each, or one of all rows; mate i has the first lengths[i] pages.
      const std::vector<size_t> lengths{18, 14, 13, 9, 1};
      const auto attend_rows = [&](const std::vector<size_t>& which, size_t rows, const Exact<float>& x) {
        Arrays arrays;
        for (const size_t i : which) {
          const size_t n = rows == 1 ? lengths[i] : pages;
          for (size_t p = 0; p < n; ++p) arrays.entry(offsets[p], formats[p], p * size, size);
          arrays.end_list();
          arrays.end_segment(rows == 1 ? n * size : 0, rows, static_cast<int64_t>(i * model.cache.open.page_bytes));
        }
        const size_t n = rows * which.size();
        Step step(model.cache);
        step.assign(arrays.view(memory.data, bytes), rope, context.pool.threads());
        Exact<float> y(n * model.out_width);
        attend(context, step, {0, 0, 1e-5f, 0.3f, nullptr, nullptr}, x.data, y.data);
        return std::pair{std::vector<float>(y.data, y.data + y.size), step.page_reads()};
      };
      Exact<float> trunk(pages * size * model.width), x(mates * model.width), row(model.width);
      for (size_t i = 0; i < trunk.size; ++i) trunk[i] = random.heavy();
      for (size_t i = 0; i < x.size; ++i) x[i] = random.heavy();
      attend_rows({0}, pages * size, trunk);
      const auto [together, reads] = attend_rows({0, 1, 2, 3, 4}, 1, x);
      // All of the longest; of the others what lies behind their last whole split of two: pages 12, 8 and 0.
      CHECK(reads == 18 + 3, isa << " " << reads);
      for (size_t i = 0; i < mates; ++i) {
        std::memcpy(row.data, x.data + i * model.width, row.size * sizeof(float));
        const auto alone = attend_rows({i}, 1, row).first;
        CHECK(std::memcmp(alone.data(), together.data() + i * model.out_width, alone.size() * sizeof(float)) == 0,
              isa << " mate " << i);
      }
    }
}

TEST(attention_takes_no_memory_once_it_has_run) {
  Context context(2, "auto");
  const size_t size = 16, half = 16, pages = 40, mates = 3;
  Model model(context, {{size, 2, 2 * half}, 3, 2}, 2);
  Exact<uint8_t> memory(mates * model.cache.open.page_bytes + (pages + mates) * model.cache.formats[3].page_bytes, 0);
  std::vector<float> cosine((pages + 1) * size * half, 1.0f), sine(cosine.size(), 0.0f);
  const RopeTable rope{cosine.data(), sine.data(), (pages + 1) * size, 2 * half};
  // The mates share all pages but the one that they are about to fill.
  Arrays arrays;
  const auto page = [&](size_t i) {
    return static_cast<int64_t>(mates * model.cache.open.page_bytes + i * model.cache.formats[3].page_bytes);
  };
  Random random(1);
  std::vector<float> x(pages * size * model.width), y(pages * size * model.out_width);
  for (float& v : x) v = random.heavy();
  Step step(model.cache);
  // per_head: every second mate has a list for each layer and head, of every second page.
  const auto run = [&](size_t n_mates, size_t first, size_t rows, bool per_head) {
    arrays.clear();
    for (size_t m = 0; m < n_mates; ++m) {
      const size_t full = (first + rows) / size;
      const bool own_lists = per_head && m % 2 == 0;
      for (size_t l = 0; l < (own_lists ? 4 : 1); ++l) {
        for (size_t p = 0; p < full; ++p) {
          const bool sealed_now = (p + 1) * size > first;
          if (own_lists && p % 2 == l % 2 && !sealed_now) continue;
          arrays.entry(page(sealed_now && rows == 1 ? pages + m : p), 3, p * size,
                       own_lists && !sealed_now ? 1 + (p + l) % size : size);
        }
        arrays.end_list();
      }
      arrays.end_segment(first, rows, static_cast<int64_t>(m * model.cache.open.page_bytes));
    }
    const BatchView batch = arrays.view(memory.data, memory.size);
    const size_t before = test::allocations();
    step.assign(batch, rope, 2);
    for (size_t layer = 0; layer < 2; ++layer)
      attend(context, step, {layer, layer, 1e-5f, 0.3f, nullptr, nullptr}, x.data(), y.data());
    return test::allocations() - before;
  };
  CHECK(run(1, 0, pages * size, false) > 0);
  for (const size_t n : {size_t{1}, mates})
    for (const bool per_head : {false, true}) {
      run(n, (pages - 1) * size + size - 1, 1, per_head);
      CHECK(run(n, (pages - 1) * size + size - 1, 1, per_head) == 0, n << " sequences that complete a page");
      run(n, pages * size, 1, per_head);
      CHECK(run(n, pages * size, 1, per_head) == 0, n << " sequences");
    }
}

TEST(attention_reads_ragged_lists_of_each_head) {
  // Exact pages with 0xff (NaN) wherever no token is; lists of each layer and head, against a plain loop over their tokens.
  for (const char* isa : test::isas())
    for (const size_t group : {1, 4}) {
      Context context(2, isa);
      const size_t size = 16, d = 8, heads = 2, layers = 2, entries = 9, n_lists = layers * heads;
      Model model(context, {{size, heads, d}, group, 2}, layers);
      const PageLayout& format = model.cache.formats[0];
      model.cache.formats[0] = layout(context.kernels, model.cache.shape.plane, layers, CodecId::f32, CodecId::f32, false);
      const size_t bytes = model.cache.open.page_bytes + entries * format.page_bytes;
      Exact<uint8_t> memory(bytes);
      Exact<float> cosine(400 * d / 2), sine(400 * d / 2, 0);
      for (size_t i = 0; i < cosine.size; ++i) cosine[i] = 1.0f;
      Random random(group);
      // All heads' k-th entries share page k; each has its own number of tokens in it.
      Arrays arrays;
      std::vector<std::vector<std::vector<float>>> keys(n_lists), values(n_lists);
      for (size_t l = 0; l < n_lists; ++l) {
        for (size_t k = 0; k < entries; ++k) {
          const size_t tokens = 1 + (7 * k + 5 * l) % size, layer = l / heads, head = l % heads;
          if ((k + l) % 4 == 0) continue;
          const size_t offset = model.cache.open.page_bytes + k * format.page_bytes;
          arrays.entry(static_cast<int64_t>(offset), 0, k * 20 + l, tokens);
          auto* k_plane = reinterpret_cast<float*>(memory.data + offset + format.layers[layer].key_offset) + head * d * size;
          auto* v_plane = reinterpret_cast<float*>(memory.data + offset + format.layers[layer].value_offset) + head * d * size;
          for (size_t t = 0; t < tokens; ++t) {
            keys[l].emplace_back(d), values[l].emplace_back(d);
            for (size_t c = 0; c < d; ++c) {
              k_plane[c * size + t] = keys[l].back()[c] = random.heavy();
              v_plane[t * d + c] = values[l].back()[c] = random.heavy();
            }
          }
        }
        arrays.end_list();
      }
      arrays.end_segment(320, 5, 0);
      Step step(model.cache);
      step.assign(arrays.view(memory.data, bytes), {cosine.data, sine.data, 400, d}, 2);
      Exact<float> x(5 * model.width), y(5 * model.out_width);
      for (size_t i = 0; i < x.size; ++i) x[i] = random.heavy();
      for (size_t layer = 0; layer < layers; ++layer) {
        attend(context, step, {layer, layer, 1e-5f, 0.3f, nullptr, nullptr}, x.data, y.data);
        for (size_t t = 0; t < 5; ++t)
          for (size_t h = 0; h < heads * group; ++h) {
            const size_t head = h / group, l = layer * heads + head;
            std::vector<const float*> ks, vs;
            for (size_t i = 0; i < keys[l].size(); ++i) ks.push_back(keys[l][i].data()), vs.push_back(values[l][i].data());
            for (size_t u = 0; u <= t; ++u) {
              ks.push_back(x.data + u * model.width + (heads * group + head) * d);
              vs.push_back(x.data + u * model.width + (heads * (group + 1) + head) * d);
            }
            std::vector<double> out(d);
            double sum = 0;
            for (size_t i = 0; i < ks.size(); ++i) {
              double score = 0;
              for (size_t c = 0; c < d; ++c) score += static_cast<double>(x[t * model.width + h * d + c]) * ks[i][c];
              const double weight = std::exp(0.3 * score);
              sum += weight;
              for (size_t c = 0; c < d; ++c) out[c] += weight * vs[i][c];
            }
            for (size_t c = 0; c < d; ++c)
              CHECK(std::abs(y[t * model.out_width + h * d + c] - out[c] / sum) < 1e-5, isa << " head " << h);
          }
      }
    }
}

TEST(attention_puts_back_open_pages) {
  // Several layers of a segment that starts within a page and spans pages have run; then the step is given up.
  Context context(2, "auto");
  const size_t size = 16, d = 8, layers = 3;
  Model model(context, {{size, 2, d}, 1, 4}, layers);
  const size_t bytes = model.cache.open.page_bytes + 2 * model.cache.formats[3].page_bytes;
  Exact<uint8_t> memory(bytes);
  std::vector<float> cosine(64 * d / 2, 1.0f), sine(64 * d / 2, 0.0f), x(40 * model.width), y(40 * model.out_width);
  Random random(3);
  Step step(model.cache);
  const auto run = [&](size_t first, size_t rows, size_t n_layers) {
    for (float& v : x) v = random.heavy();
    Arrays arrays;
    for (size_t p = 0; p < (first + rows) / size; ++p)
      arrays.entry(static_cast<int64_t>(model.cache.open.page_bytes + p * model.cache.formats[3].page_bytes), 3, p * size,
                   size);
    arrays.end_list();
    arrays.end_segment(first, rows, 0);
    step.assign(arrays.view(memory.data, bytes), {cosine.data(), sine.data(), 64, d}, 2);
    for (size_t layer = 0; layer < n_layers; ++layer)
      attend(context, step, {layer, layer, 1e-5f, 0.3f, nullptr, nullptr}, x.data(), y.data());
  };
  const auto tokens = [&](size_t n) {
    std::vector<float> all;
    for (const LayerPlanes& planes : model.cache.open.layers)
      for (size_t i = 0; i < 2 * d; ++i) {
        const auto* key = reinterpret_cast<const float*>(memory.data + planes.key_offset) + i * size;
        all.insert(all.end(), key, key + n);
        const auto* value = reinterpret_cast<const float*>(memory.data + planes.value_offset) + i / d * d * size;
        for (size_t t = 0; t < n; ++t) all.push_back(value[t * d + i % d]);
      }
    return all;
  };
  run(0, 9, layers);
  const std::vector<float> before = tokens(9);
  run(9, 30, 2);
  CHECK(tokens(9) != before);
  step.restore();
  CHECK(tokens(9) == before);
  run(9, 2, 1);  // nothing is gathered: nothing to put back
  step.restore();
  CHECK(tokens(9) == before);
}

TEST(attention_is_near_a_plain_loop) {
  for (const char* isa : test::isas()) {
    Context context(2, isa);
    const size_t d = 16, tokens = 75, page_size = 16;
    Model model(context, {{page_size, 1, d}, 2, 2}, 1);
    // All pages exact, whatever their format's number.
    const PageLayout exact = layout(context.kernels, model.cache.shape.plane, 1, CodecId::f32, CodecId::f32, false);
    model.cache.formats.assign(5, exact);
    Random random(9);
    std::vector<float> qkv(tokens * model.width);
    for (float& v : qkv) v = random.heavy();
    const auto got = run(model, qkv, tokens, {40, 35});
    for (size_t t = 0; t < tokens; ++t)
      for (size_t g = 0; g < 2; ++g) {
        std::vector<double> weight(t + 1);
        double sum = 0;
        for (size_t u = 0; u <= t; ++u) {
          // Every position turns by the same angle, which leaves scores as they were.
          double score = 0;
          for (size_t c = 0; c < d; ++c)
            score += static_cast<double>(qkv[t * model.width + g * d + c]) * qkv[u * model.width + 2 * d + c];
          weight[u] = std::exp(0.125 * score);
          sum += weight[u];
        }
        for (size_t c = 0; c < d; ++c) {
          double want = 0;
          for (size_t u = 0; u <= t; ++u) want += weight[u] / sum * qkv[u * model.width + 3 * d + c];
          CHECK(std::abs(got[t * model.out_width + g * d + c] - want) < 1e-5, isa << " token " << t);
        }
      }
  }
}

TEST(attention_reports_what_it_cannot_seal) {
  Context context(2, "auto");
  Model model(context, {{16, 2, 8}, 1, 4}, 1);
  std::vector<float> qkv(40 * model.width, 1.0f);
  qkv[20 * model.width + 2 * 8 + 8 + 3] = NAN;  // token 20, key of head 1
  bool thrown = false;
  try {
    run(model, qkv, 40, {5, 35});
  } catch (const CodecRangeError& e) {
    thrown = std::strstr(e.what(), "key of head 1") != nullptr && std::strstr(e.what(), "layer 0, token 20") != nullptr;
  }
  CHECK(thrown);
}
