// Watching what the host does with pinned memory, see watch.h.
//
// A thread that has started a non-blocking copy of pinned memory gets a dispatch key switched on, through which all its
// operators pass from then on. What does not pass torch's dispatcher is not seen: a NumPy array or a data pointer taken
// from the tensor, and operators on threads that have never started such a copy themselves.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "tensors.h"
#include "watch.h"

namespace zerolap_sim {

// torch has no key for outsiders; this one is unused, stands above autograd, and is meant to be switched on per thread.
constexpr auto kWatchKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

void watch_pinned_memory() {
  if (Runtime::get().settings().track_pinned) c10::impl::tls_set_dispatch_key_included(kWatchKey, true);
}

namespace {

// Does the operator itself touch the bytes of its operands, on the host? Composites do not: their parts pass here, too.
bool touches_bytes(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  if (name == "aten::resolve_conj") return true;  // how tolist() begins; the rest of it passes by the dispatcher
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) return false;
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return false;  // a view
  bool for_device = name == "aten::record_stream" || name == "aten::is_pinned" || name == "aten::_pin_memory";
  const size_t num_args = schema.arguments().size();
  for (size_t i = stack.size() - num_args; i < stack.size(); ++i) {
    if (stack[i].isDevice() && stack[i].toDevice().type() == kDeviceType) for_device = true;
    each_tensor(stack[i], [&](const at::Tensor& t) { for_device |= is_on_device(t); });
  }
  return !for_device;
}

std::vector<Operand> pinned_operands(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  std::vector<Operand> operands;
  const size_t num_args = schema.arguments().size(), first = stack.size() - num_args;
  for (size_t i = 0; i < num_args; ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    each_tensor(stack[first + i], [&](const at::Tensor& t) {
      if (pinned_block_of(t) && t.numel() > 0) operands.push_back(operand(t, alias && alias->isWrite()));
    });
  }
  return operands;
}

void watch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kWatchKey);
  if (!touches_bytes(op, *stack)) return op.redispatchBoxed(below, stack);
  const auto operands = pinned_operands(op.schema(), *stack);
  if (!operands.empty()) {
    const std::string& name = op.schema().name();
    Runtime::get().touch_on_host(name.rfind("aten::", 0) == 0 ? name.substr(6) : name, operands);
  }
  c10::impl::ExcludeDispatchKeyGuard once(kWatchKey);  // its parts are not reported a second time
  op.redispatchBoxed(below, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&watch>()); }

}  // namespace zerolap_sim
