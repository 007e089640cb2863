// The few places where the runtime meets the interpreter, see python.h.
#include <Python.h>
#include <c10/macros/Export.h>

#include "python.h"
#include "runtime.h"

namespace torch::autograd {
TORCH_API int get_current_graph_task_id();  // its header brings the whole engine along
}

namespace zerolap_sim {

static bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

static bool is_python_gone() {
#if PY_VERSION_HEX >= 0x030D0000
  return !Py_IsInitialized() || Py_IsFinalizing();
#else
  return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
}

static void without_gil(const std::function<void()>& wait) {
  if (is_python_gone() || !PyGILState_Check()) return wait();
  PyThreadState* state = PyEval_SaveThread();
  wait();  // throws nothing
  PyEval_RestoreThread(state);
}

void clear_python_error() {
  if (is_python_gone()) return;
  PyGILState_STATE state = PyGILState_Ensure();
  PyErr_Clear();
  PyGILState_Release(state);
}

// The innermost frames of the calling thread, outermost last. Never called with the runtime's mutex held.
static std::string python_stack() {
  constexpr int kMaxFrames = 12;
  if (is_python_gone()) return "";
  std::string result;
  PyGILState_STATE state = PyGILState_Ensure();
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  for (int i = 0; frame && i < kMaxFrames; ++i) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    const char* name = PyUnicode_AsUTF8(code->co_name);
    result += std::string(file ? file : "?") + ":" + std::to_string(PyFrame_GetLineNumber(frame)) + " in " +
              (name ? name : "?") + "\n";
    Py_DECREF(code);
    PyFrameObject* outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  Py_XDECREF(frame);
  PyGILState_Release(state);
  return result.empty() && in_backward() ? "(autograd engine, no Python frame)\n" : result;
}

void register_python() {
  auto& runtime = Runtime::get();
  runtime.python_stack = &python_stack;
  runtime.without_gil = &without_gil;
  runtime.set_in_backward(&in_backward);
}

}  // namespace zerolap_sim
