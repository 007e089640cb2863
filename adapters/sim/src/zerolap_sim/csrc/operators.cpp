// Operators: one boxed fallback that turns any torch operator into a kernel on the current stream, and the few
// operators that it cannot serve.
//
//   view         made at once on a host alias; nothing is launched
//   in-place     launched; the written arguments are returned
//   functional   shapes from the meta kernel; outputs allocated; the CPU operator and a copy into them launched
//   host value   (item, nonzero, anything whose shape is in its data) the current stream is drained, as on a card
//
// [Note: random numbers] The device draws from torch's CPU generator, so that torch.manual_seed governs it and the
// numbers equal the CPU's. A draw happens when a kernel runs, and kernels run when they like, so the numbers are
// settled at launch: the kernel gets a copy of the generator as it stands, and the generator itself is moved on by
// drawing the same on scratch memory. Where the amount drawn depends on data, the stream is drained instead.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <unordered_map>

#include "device.h"
#include "python.h"
#include "watch.h"

namespace zerolap_sim {

using c10::IValue;
using torch::jit::Stack;

static Runtime& rt() { return Runtime::get(); }
static c10::Device device(int index) { return {kDeviceType, static_cast<c10::DeviceIndex>(index)}; }

namespace {

// ---- arguments -------------------------------------------------------------------------------------------------------

// Rebuild a value with every tensor in it replaced, and the device, if it names ours.
template <class F>
IValue map_tensors(const IValue& value, const F& replace, c10::DeviceType device_type) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) list.push_back(replace(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
      list.push_back(t ? std::optional<at::Tensor>(replace(*t)) : std::nullopt);
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kDeviceType) return c10::Device(device_type);
  return value;
}

template <class F>
Stack map_all(const Stack& args, const F& replace, c10::DeviceType device_type) {
  Stack result;
  result.reserve(args.size());
  for (const auto& value : args) result.push_back(map_tensors(value, replace, device_type));
  return result;
}

at::Tensor for_kernel(const at::Tensor& t) {
  if (!t.defined()) return t;
  if (is_on_device(t)) return host_alias(t);
  at::Tensor copy = t.clone();  // a host operand is read at launch, as a kernel's arguments are
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

at::Tensor for_meta(const at::Tensor& t) {
  if (!t.defined() || (!is_on_device(t) && t.dim() == 0)) return t;  // a host scalar takes part in type promotion as is
  auto meta = at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta));
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

at::Tensor for_scratch(const at::Tensor& t) {
  return is_on_device(t) ? at::zeros(t.sizes(), t.options().device(c10::kCPU)) : t;
}

void run_on_host(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const Stack held = stack;  // older versions return several out= after they have dropped what only the stack held
  op.callBoxed(&stack);
}

// Run the meta kernels; false where there are none, or where the shape depends on data, or where the call is wrong.
bool run_on_meta(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  try {
    op.callBoxed(&stack);
    return true;
  } catch (const std::exception&) {
    clear_python_error();  // many meta kernels are Python
    return false;
  }
}

// ---- what kind of operator is it? ------------------------------------------------------------------------------------

enum class Kind { View, InPlace, Functional, HostValue };
enum class Draws { Nothing, Countable, DataDependent };

struct Traits {
  Kind kind = Kind::HostValue;
  Draws draws = Draws::Nothing;
  bool has_out = false;
  int generator = -1;       // position of the generator argument
  bool is_batch_norm = false;
  bool runs_on_cpu = false;
};

bool returns_tensors(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    const auto& type = result.type();
    const bool is_list = type->kind() == c10::TypeKind::ListType &&
                         type->containedType(0)->kind() == c10::TypeKind::TensorType;
    if (type->kind() != c10::TypeKind::TensorType && !is_list) return false;
  }
  return true;
}

// Operators that draw a number of times that follows from the shapes alone.
bool draws_countably(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::normal_",    "aten::uniform_",     "aten::bernoulli_", "aten::bernoulli", "aten::random_",
      "aten::exponential_", "aten::log_normal_", "aten::cauchy_",   "aten::geometric_", "aten::normal",
      "aten::randperm"};
  return names.count(name) > 0;
}

Traits study(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  Traits traits;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    if (argument.is_out()) traits.has_out = true;
    auto type = argument.type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    if (type->kind() == c10::TypeKind::GeneratorType) traits.generator = static_cast<int>(i);
  }
  if (traits.generator >= 0 || op.hasTag(at::Tag::nondeterministic_seeded))
    traits.draws = traits.generator >= 0 && draws_countably(schema.name()) ? Draws::Countable : Draws::DataDependent;
  traits.runs_on_cpu = op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  traits.is_batch_norm = schema.name() == "aten::native_batch_norm";

  bool any_view = false, all_written = true;
  for (const auto& result : schema.returns()) {
    const auto* alias = result.alias_info();
    if (alias && !alias->isWrite()) any_view = true;
    if (!alias || !alias->isWrite()) all_written = false;
  }
  if (!returns_tensors(schema)) {
    traits.kind = Kind::HostValue;
  } else if (any_view) {
    traits.kind = Kind::View;
  } else {
    traits.kind = all_written ? Kind::InPlace : Kind::Functional;
  }
  return traits;
}

const Traits& traits_of(const c10::OperatorHandle& op) {
  static thread_local std::unordered_map<const c10::FunctionSchema*, Traits> known;
  auto [found, is_new] = known.try_emplace(&op.schema());
  if (is_new) found->second = study(op);
  return found->second;
}

// ---- one call --------------------------------------------------------------------------------------------------------

struct Call {
  const c10::OperatorHandle op;
  const Traits& traits;
  Stack args;
  int device_index;
  Stream& stream;

  const c10::FunctionSchema& schema() const { return op.schema(); }
  std::string name() const {
    const std::string& full = schema().name();
    return full.rfind("aten::", 0) == 0 ? full.substr(6) : full;
  }
  bool writes(size_t i) const {
    const auto* alias = schema().arguments()[i].alias_info();
    if (alias && alias->isWrite()) return true;
    // The one operator whose schema does not say that it updates the running statistics.
    return traits.is_batch_norm && (i == 3 || i == 4) && args[5].toBool();
  }
  std::vector<Operand> operands() const {
    std::vector<Operand> result;
    for (size_t i = 0; i < args.size(); ++i)
      each_tensor(args[i], [&](const at::Tensor& t) {
        if (is_on_device(t) && t.numel() > 0) result.push_back(operand(t, writes(i)));
      });
    return result;
  }
  void return_written(Stack* stack) const {
    size_t left = schema().returns().size();
    for (size_t i = 0; i < args.size() && left > 0; ++i)
      if (writes(i)) stack->push_back(args[i]), --left;
  }
};

int device_of(const Stack& args) {
  int index = -1, named = -1;
  for (const auto& value : args) {
    if (value.isDevice() && value.toDevice().type() == kDeviceType && value.toDevice().has_index())
      named = value.toDevice().index();
    each_tensor(value, [&](const at::Tensor& t) {
      // A scalar may sit on another device, as on CUDA; the first tensor with dimensions decides.
      if (is_on_device(t) && (index < 0 || t.dim() > 0)) index = t.device().index();
    });
  }
  return index >= 0 ? index : named >= 0 ? named : current_device();
}

void make_view(const Call& call, Stack* stack) {
  at::Tensor base;
  for (const auto& value : call.args)
    if (!base.defined() && value.isTensor() && is_on_device(value.toTensor())) base = value.toTensor();
  Stack results = map_all(call.args, for_kernel, c10::kCPU);
  run_on_host(call.op, results);
  for (const auto& value : results)
    stack->push_back(map_tensors(value, [&](const at::Tensor& t) { return device_view(base, t); }, kDeviceType));
}

// The stream is drained and the operator runs on this thread, in program order.
void run_drained(Call& call, Stack* stack) {
  rt().launch(call.stream, call.name(), call.operands(), [] {});
  rt().synchronize(call.stream);
  Stack values = map_all(call.args, for_kernel, c10::kCPU);
  for (size_t i = 0; i < call.args.size(); ++i)  // out= may be resized, which an alias cannot
    if (call.schema().arguments()[i].is_out() && call.args[i].isTensor())
      values[i] = at::empty({0}, call.args[i].toTensor().options().device(c10::kCPU));
  Stack inputs = values;
  run_on_host(call.op, values);
  if (call.traits.kind == Kind::InPlace) {
    for (size_t i = 0; i < call.args.size(); ++i)
      if (call.schema().arguments()[i].is_out() && call.args[i].isTensor()) {
        const at::Tensor& out = call.args[i].toTensor();
        at::native::resize_output(out, inputs[i].toTensor().sizes());
        out.copy_(inputs[i].toTensor());
      }
    return call.return_written(stack);
  }
  auto upload = [&](const at::Tensor& t) { return t.defined() ? t.to(device(call.device_index)) : t; };
  for (const auto& value : values) stack->push_back(map_tensors(value, upload, kDeviceType));
}

// See [Note: random numbers].
void settle_random_numbers(Call& call) {
  auto& slot = call.args[call.traits.generator];
  at::Generator generator = slot.isNone() ? at::detail::getDefaultCPUGenerator() : slot.toGenerator();
  at::Generator as_it_stands;
  {
    std::lock_guard<std::mutex> lock(generator.mutex());
    as_it_stands = generator.clone();
  }
  Stack scratch = map_all(call.args, for_scratch, c10::kCPU);
  scratch[call.traits.generator] = generator;
  run_on_host(call.op, scratch);
  slot = as_it_stands;
}

// An out= that has elements is taken to have the right shape: torch's own code makes it to measure, and resizing one is
// deprecated (here the kernel fails). Meta kernels in Python would cost more than all the rest.
bool has_sized_out(const Call& call) {
  bool sized = true;
  for (size_t i = 0; i < call.args.size(); ++i)
    if (call.schema().arguments()[i].is_out())
      each_tensor(call.args[i], [&](const at::Tensor& t) { sized = sized && t.defined() && t.numel() > 0; });
  return sized;
}

void run_in_place(Call& call, Stack* stack) {
  if (call.traits.has_out && !has_sized_out(call)) {
    Stack meta = map_all(call.args, for_meta, c10::kMeta);
    const Stack meta_args = meta;
    if (!run_on_meta(call.op, meta)) return run_drained(call, stack);
    for (size_t i = 0; i < call.args.size(); ++i)
      if (call.schema().arguments()[i].is_out() && call.args[i].isTensor())
        at::native::resize_output(call.args[i].toTensor(), meta_args[i].toTensor().sizes());
  }
  if (call.traits.draws == Draws::Countable) settle_random_numbers(call);
  auto values = std::make_shared<Stack>(map_all(call.args, for_kernel, c10::kCPU));
  rt().launch(call.stream, call.name(), call.operands(), [op = call.op, values] { run_on_host(op, *values); });
  call.return_written(stack);
}

void run_functional(Call& call, Stack* stack) {
  Stack meta = map_all(call.args, for_meta, c10::kMeta);
  if (!run_on_meta(call.op, meta)) return run_drained(call, stack);
  for (const auto& result : call.schema().returns())
    TORCH_CHECK(!result.alias_info(), "simulated device: ", call.schema().name(),
                " returns both new and written tensors, which is not supported");
  if (call.traits.draws == Draws::Countable) settle_random_numbers(call);
  auto operands = call.operands();
  auto values = std::make_shared<Stack>(map_all(call.args, for_kernel, c10::kCPU));
  auto outputs = std::make_shared<std::vector<at::Tensor>>();
  auto allocate = [&](const at::Tensor& like) -> at::Tensor {
    if (!like.defined()) {
      outputs->emplace_back();
      return like;
    }
    auto out = at::empty_strided(like.sizes(), like.strides(), like.options().device(device(call.device_index)));
    if (out.numel() > 0) operands.push_back(operand(out, true));
    outputs->push_back(host_alias(out));
    return out;
  };
  Stack results;
  for (const auto& value : meta) results.push_back(map_tensors(value, allocate, kDeviceType));
  rt().launch(call.stream, call.name(), operands, [op = call.op, values, outputs] {
    run_on_host(op, *values);
    at::AutoDispatchBelowADInplaceOrView guard;
    size_t next = 0;
    for (const auto& value : *values)
      each_tensor(value, [&](const at::Tensor& t) {
        const at::Tensor& out = outputs->at(next++);
        if (out.defined() && t.defined()) out.copy_(t);
      });
  });
  for (auto& value : results) stack->push_back(std::move(value));
}

// A card cannot read the host's memory: beside its own tensors it takes scalars, and indices, which torch brings over.
void require_one_device(const Call& call) {
  static const std::set<std::string> takes_host_tensors = {
      "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_foreach_copy_"};
  if (takes_host_tensors.count(call.schema().name())) return;
  for (const auto& value : call.args)
    each_tensor(value, [&](const at::Tensor& t) {
      TORCH_CHECK(!t.defined() || is_on_device(t) || t.dim() == 0 || t.numel() == 0, "simulated device: ",
                  call.schema().name(), " expects all tensors to be on the same device, but one of shape ", t.sizes(),
                  " is on ", t.device());
    });
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const size_t num_args = op.schema().arguments().size();
  Stack args(std::make_move_iterator(stack->end() - num_args), std::make_move_iterator(stack->end()));
  torch::jit::drop(*stack, num_args);
  const int index = device_of(args);
  Call call{op, traits_of(op), std::move(args), index, current_stream(index)};
  TORCH_CHECK_NOT_IMPLEMENTED(call.traits.runs_on_cpu, "simulated device: ", op.schema().name(),
                              " has no CPU kernel, which the simulated device would run");
  require_one_device(call);
  if (call.traits.draws == Draws::DataDependent) return run_drained(call, stack);
  switch (call.traits.kind) {
    case Kind::View: return make_view(call, stack);
    case Kind::InPlace: return run_in_place(call, stack);
    case Kind::Functional: return run_functional(call, stack);
    case Kind::HostValue: return run_drained(call, stack);
  }
}

// ---- operators that the fallback cannot serve ------------------------------------------------------------------------

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

void launch_copy(Stream& stream, const char* name, const std::vector<Operand>& operands, const at::Tensor& from,
                 const at::Tensor& to) {
  rt().launch(stream, name, operands, [from, to] {
    at::AutoDispatchBelowADInplaceOrView guard;
    to.copy_(from);
  });
}

// Between two devices both current streams take part: the copy comes after the work of either, and either goes on
// after the copy.
void copy_across(const at::Tensor& from, const at::Tensor& to) {
  Stream& source = current_stream(from.device().index());
  Stream& target = current_stream(to.device().index());
  if (&source != &target) rt().wait(source, rt().record(target));
  launch_copy(source, "copy device to device", {operand(from, false), operand(to, true)}, host_alias(from),
              host_alias(to));
  if (&source != &target) rt().wait(target, rt().record(source));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  if (is_on_device(from) && is_on_device(to)) {
    copy_across(from, to);
    return to;
  }
  const bool upload = is_on_device(to);
  const at::Tensor& ours = upload ? to : from;
  const at::Tensor& host = upload ? from : to;
  Stream& stream = current_stream(ours.device().index());
  std::vector<Operand> operands{operand(ours, upload)};
  const bool pinned = pinned_block_of(host) != nullptr;
  if (pinned) operands.push_back(operand(host, !upload));
  // From pageable memory a driver stages the bytes before it returns; into pageable memory it waits for the copy.
  const at::Tensor there = pinned ? host_alias(host) : upload && non_blocking ? host.clone() : host;
  const at::Tensor here = host_alias(ours);
  if (upload) {
    launch_copy(stream, "copy host to device", operands, there, here);
  } else {
    launch_copy(stream, "copy device to host", operands, here, there);
  }
  if (!non_blocking || (!upload && !pinned)) {
    rt().synchronize(stream);
  } else if (pinned) {
    watch_pinned_memory();
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage_geometry(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                                 c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  const int64_t size = static_cast<int64_t>(storage.nbytes() / self.itemsize()), stride = 1;
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(c10::IntArrayRef(&size, 1), c10::IntArrayRef(&stride, 1), 0);
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  const auto& data = self.storage().data_ptr();
  if (is_tenancy(data)) rt().record_use(block_of(data), rt().stream(stream.device_index(), stream.id()));
}

// torch sends convolutions of out-of-tree devices to an operator of their own; they are ordinary convolutions here.
void convolution(const c10::OperatorHandle&, Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  fallback(op, stack);
}
void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  // This one takes the bias' sizes, after grad_output, input and weight of ten arguments.
  const int64_t channels = (*stack)[stack->size() - 10].toTensor().size(1);
  stack->insert(stack->end() - 7, IValue(c10::List<int64_t>({channels})));
  fallback(op, stack);
}

// torch would take its fused dropout, which rounds differently from the one it takes on CPU.
at::Tensor dropout(const at::Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.numel() == 0) return input;
  if (p == 1) return input.mul(at::zeros({}, input.options()));
  return input.mul(at::empty_like(input).bernoulli_(1 - p).div_(1 - p));
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// Where torch itself has none for this key, as older versions: operators that autograd does not know pass it by.
void register_autograd_fallback() {
  if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(c10::DispatchKey::AutogradPrivateUse1)) return;
  static torch::Library library(torch::Library::IMPL, "_", c10::DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
  library.fallback(torch::CppFunction::makeFallthrough());
}

// A copy reads conjugated and negated views as they are; materialising them first would take a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("dropout", &dropout); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_geometry);
  m.impl("record_stream", &record_stream);
  m.impl("dropout", &dropout);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace zerolap_sim
