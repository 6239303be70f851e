// The Python module octavo.ops._cpu: context, errors, and the parts that the other bindings_*.cpp files add.
#include "bindings.hpp"

#include <nanobind/stl/string.h>

#include <sstream>

#include "errors.hpp"

namespace octavo {

[[noreturn]] void throw_array_error(const char* name, const char* dtype, std::initializer_list<int64_t> shape,
                                    const Array& got) {
  const nb::dlpack::dtype t = got.dtype();
  const char* kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  std::ostringstream text;
  text << name << ": expected a C-contiguous " << dtype << " array [";
  const char* comma = "";
  for (int64_t n : shape) {
    text << comma;
    n < 0 ? text << "n" : text << n;
    comma = ", ";
  }
  text << "], got " << (t.code < 7 ? kinds[t.code] : "unknown") << static_cast<int>(t.bits) << " [";
  for (size_t i = 0; i < got.ndim(); ++i) text << (i ? ", " : "") << got.shape(i);
  text << "] with strides [";
  for (size_t i = 0; i < got.ndim(); ++i) text << (i ? ", " : "") << got.stride(i);
  text << "]";
  throw std::invalid_argument(text.str());
}

namespace {

// Raises octavo.errors.<name> for a C++ exception class.
template <class E>
void translate(nb::module_& errors, const char* name) {
  nb::object type = errors.attr(name);
  nb::register_exception_translator(
      [](const std::exception_ptr& p, void* payload) {
        try {
          std::rethrow_exception(p);
        } catch (const E& e) {
          PyErr_SetString(static_cast<PyObject*>(payload), e.what());
        }
      },
      type.release().ptr());
}

}  // namespace

void bind_math(nb::module_& m) {
  const auto elementwise = [](Context& c, Array x, ArrayRw y, void (*f)(const float*, size_t, float*)) {
    const float* px = in<float>(x, "x", {-1});
    float* py = out<float>(y, "out", {static_cast<int64_t>(x.shape(0))});
    const size_t n = x.shape(0);
    run_locked(c, [&] { f(px, n, py); });
  };
  m.def("exp", [=](Context& c, Array x, ArrayRw out) { elementwise(c, x, out, c.kernels.math.exp); },
        nb::arg("context"), nb::arg("x"), nb::arg("out"), "out = exp(x), float32 [n].");
  m.def("silu", [=](Context& c, Array x, ArrayRw out) { elementwise(c, x, out, c.kernels.math.silu); },
        nb::arg("context"), nb::arg("x"), nb::arg("out"), "out = x / (1 + exp(-x)), float32 [n].");
  m.def(
      "rms_norm",
      [](Context& c, Array x, Array weight, float eps, ArrayRw y) {
        const float* px = in<float>(x, "x", {-1, -1});
        const int64_t d = static_cast<int64_t>(x.shape(1));
        const float* pw = in<float>(weight, "weight", {d});
        float* py = out<float>(y, "out", {static_cast<int64_t>(x.shape(0)), d});
        const size_t n = x.shape(0), width = x.shape(1);
        run_locked(c, [&] {
          for (size_t i = 0; i < n; ++i) c.kernels.math.rms_norm(px + i * width, pw, eps, width, py + i * width);
        });
      },
      nb::arg("context"), nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("out"),
      "out = x / sqrt(mean(x^2) + eps) * weight, float32 [n, d].");
}

}  // namespace octavo

NB_MODULE(_cpu, m) {
  using namespace octavo;
  // An engine that is never closed outlives the interpreter's last look; that is no fault of the bindings.
  nb::set_leak_warnings(false);
  m.doc() = "C++ kernels of the cpu backend. Calls release the GIL; arrays are checked, never copied.";
  m.attr("KERNEL_REVISION") = kKernelRevision;
  m.attr("MAX_HEAD_DIM") = kMaxHeadDim;

  nb::module_ errors = nb::module_::import_("octavo.errors");
  // Translators are tried newest first; LoadError last registered, so a subclass would be caught by its own.
  translate<CodecRangeError>(errors, "CodecRangeError");
  translate<UnsupportedError>(errors, "UnsupportedError");
  translate<LoadError>(errors, "LoadError");

  nb::class_<Context>(m, "Context", "Threads, kernels of one instruction set, and reused scratch memory.")
      .def(
          "__init__",
          [](Context* self, int threads, const std::string& isa) { new (self) Context(threads, isa.c_str()); },
          nb::arg("threads"), nb::arg("isa") = "auto",
          "threads: from 1; the calling thread is one of them. isa: \"auto\", \"portable\", \"avx2\" or \"avx512\". "
          "Raises ValueError when this build or machine lacks the path.")
      .def_prop_ro("threads", [](const Context& c) { return c.pool.threads(); })
      .def_prop_ro("isa", [](const Context& c) { return c.kernels.isa; })
      .def_prop_ro("scratch_bytes", [](const Context& c) { return c.scratch.bytes(); });
  m.def("have_isa", [](const std::string& isa) { return have_kernels(isa.c_str()); }, nb::arg("isa"),
        "Whether Context(isa=...) would succeed.");

  bind_math(m);
  bind_codecs(m);
  bind_attention(m);
  bind_linear(m);
  bind_peaks(m);
  bind_sampling(m);
}
