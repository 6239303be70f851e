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
    const int32_t rows[] = {0, static_cast<int32_t>(n)}, position = static_cast<int32_t>(done);
    const int32_t entries[] = {0, static_cast<int32_t>((done + n) / size)};
    const int64_t open = 0;
    const BatchView batch{memory.data, bytes, n, 1, static_cast<size_t>(entries[1]), rows, &position, entries,
                          offsets.data(), formats.data(), &open};
    step.assign(batch, {cosine.data, sine.data, tokens, 2 * half}, m.context.pool.threads());
    for (size_t layer = 0; layer < m.cache.open.layers.size(); ++layer) {
      Exact<float> x(n * m.width), y(n * m.out_width);
      std::memcpy(x.data, qkv.data() + done * m.width, x.size * sizeof(float));
      attend(m.context, step, {layer, 1e-5f, 0.125f, nullptr, nullptr}, x.data, y.data);
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
        std::vector<int32_t> row_start{0}, position, entry_start{0};
        std::vector<int64_t> page_offset, open;
        std::vector<uint8_t> page_format;
        for (const size_t i : which) {
          const size_t n = rows == 1 ? lengths[i] : pages;
          row_start.push_back(row_start.back() + static_cast<int32_t>(rows));
          position.push_back(rows == 1 ? static_cast<int32_t>(n * size) : 0);
          page_offset.insert(page_offset.end(), offsets.begin(), offsets.begin() + static_cast<ptrdiff_t>(n));
          page_format.insert(page_format.end(), formats.begin(), formats.begin() + static_cast<ptrdiff_t>(n));
          entry_start.push_back(static_cast<int32_t>(page_offset.size()));
          open.push_back(static_cast<int64_t>(i * model.cache.open.page_bytes));
        }
        const size_t n = rows * which.size();
        const BatchView batch{memory.data, bytes, n, which.size(), page_offset.size(), row_start.data(),
                              position.data(), entry_start.data(), page_offset.data(), page_format.data(), open.data()};
        Step step(model.cache);
        step.assign(batch, rope, context.pool.threads());
        Exact<float> y(n * model.out_width);
        attend(context, step, {0, 1e-5f, 0.3f, nullptr, nullptr}, x.data, y.data);
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
  std::vector<int32_t> row_start, position, entry_start;
  std::vector<int64_t> page_offset, open;
  std::vector<uint8_t> page_format;
  const auto page = [&](size_t i) {
    return static_cast<int64_t>(mates * model.cache.open.page_bytes + i * model.cache.formats[3].page_bytes);
  };
  Random random(1);
  std::vector<float> x(pages * size * model.width), y(pages * size * model.out_width);
  for (float& v : x) v = random.heavy();
  Step step(model.cache);
  const auto run = [&](size_t n_mates, size_t first, size_t rows) {
    row_start.assign(1, 0), entry_start.assign(1, 0);
    position.clear(), page_offset.clear(), open.clear(), page_format.clear();
    for (size_t m = 0; m < n_mates; ++m) {
      const size_t full = (first + rows) / size;
      row_start.push_back(static_cast<int32_t>((m + 1) * rows));
      position.push_back(static_cast<int32_t>(first));
      for (size_t p = 0; p < full; ++p) page_offset.push_back(page(p + 1 == full && rows == 1 ? pages + m : p));
      page_format.resize(page_offset.size(), 3);
      entry_start.push_back(static_cast<int32_t>(page_offset.size()));
      open.push_back(static_cast<int64_t>(m * model.cache.open.page_bytes));
    }
    const BatchView batch{memory.data, memory.size, n_mates * rows, n_mates, page_offset.size(), row_start.data(),
                          position.data(), entry_start.data(), page_offset.data(), page_format.data(), open.data()};
    const size_t before = test::allocations();
    step.assign(batch, rope, 2);
    for (size_t layer = 0; layer < 2; ++layer)
      attend(context, step, {layer, 1e-5f, 0.3f, nullptr, nullptr}, x.data(), y.data());
    return test::allocations() - before;
  };
  CHECK(run(1, 0, pages * size) > 0);
  for (const size_t n : {size_t{1}, mates}) {
    run(n, (pages - 1) * size + size - 1, 1);
    CHECK(run(n, (pages - 1) * size + size - 1, 1) == 0, n << " sequences that complete a page");
    run(n, pages * size, 1);
    CHECK(run(n, pages * size, 1) == 0, n << " sequences");
  }
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
