// The Python module: everything Python sees of the runtime, typed in _extension.pyi.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "device.h"
#include "process_group.h"
#include "python.h"

namespace py = pybind11;
using namespace zerolap_sim;

static Runtime& rt() { return Runtime::get(); }

namespace {
// What one host thread hands to another, see [Note: host threads] in checker.h.
struct HandOver {
  Clock clock;
};
}  // namespace

static py::tuple as_tuple(const Side& side) {
  return py::make_tuple(side.op, side.stream, side.stream_id, side.device, side.write, py::tuple(py::cast(side.tensor.sizes)),
                        side.tensor.dtype, side.block_number, side.block_size, side.first_byte, side.end_byte, side.stack);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::module::import("torch._C._distributed_c10d");  // the base class of the process group
  register_device();
  register_autograd_fallback();
  register_python();

  m.def("device_count", [] { return rt().num_devices(); });
  m.def("current_device", &current_device);
  m.def("exchange_device", &exchange_device);
  m.def("set_num_devices", [](int count) { rt().set_num_devices(count); });
  m.def("bytes_in_use", [](int device) { return rt().bytes_in_use(device); });
  m.def("peak_bytes", [](int device) { return rt().peak_bytes(device); });
  m.def("reset_peak", [](int device) { rt().reset_peak(device); });
  m.def("fail", [](const std::string& message) { rt().fail(message); });
  m.def("has_failed", [] { return rt().has_failed(); });
  m.def("drain", [](double limit) {
    py::gil_scoped_release release;
    rt().drain(std::chrono::milliseconds(static_cast<int64_t>(limit * 1000)));
  });

  m.def("settings", [] {
    const Settings s = rt().settings();
    py::dict result;
    result["delay_us"] = s.delay_us;
    result["delay_probability"] = s.delay_probability;
    result["seed"] = s.seed;
    result["synchronous"] = s.synchronous;
    result["stacks"] = s.stacks;
    result["execute"] = s.execute;
    result["track_pinned"] = s.track_pinned;
    result["checker"] = rt().checker_enabled();
    return result;
  });
  m.def(
      "configure",
      [](int64_t delay_us, double delay_probability, uint64_t seed, bool synchronous, bool stacks, bool execute,
         bool track_pinned, bool checker) {
        rt().configure({delay_us, delay_probability, seed, synchronous, stacks, execute, track_pinned});
        rt().enable_checker(checker);
      },
      py::kw_only(), py::arg("delay_us"), py::arg("delay_probability"), py::arg("seed"), py::arg("synchronous"),
      py::arg("stacks"), py::arg("execute"), py::arg("track_pinned"), py::arg("checker"));
  m.def("take_reports", [] {
    py::list result;
    for (const auto& report : rt().take_reports())
      result.append(py::make_tuple(report.kind, as_tuple(report.first), as_tuple(report.second), report.count));
    return result;
  });

  py::class_<HandOver>(m, "HandOver")
      .def(py::init<>())
      .def("give", [](HandOver& self) { join(self.clock, rt().publish()); })
      .def("take", [](HandOver& self) { rt().receive(self.clock); });

  m.def("inject", [](const std::string& collective, bool timeout, int after) {
    inject(collective, timeout ? Fault::Timeout : Fault::Failure, after);
  });
  py::class_<SimBackend, c10::intrusive_ptr<SimBackend>, c10d::Backend>(m, "SimBackend")
      .def(py::init([](c10::intrusive_ptr<c10d::Backend> inner, std::string name, std::chrono::milliseconds timeout) {
        return c10::make_intrusive<SimBackend>(std::move(inner), std::move(name), timeout);
      }))
      .def_property_readonly("options", &SimBackend::getBackendOptions);
}
