// Between torch's tensors and the runtime's bytes: aliases for kernels, regions for the checker.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "runtime.h"

namespace zerolap_sim {

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;

inline bool is_on_device(const at::Tensor& t) { return t.defined() && t.device().type() == kDeviceType; }

// The block behind a device tensor's storage, or behind pinned host memory; null for other host memory.
BlockPtr block_of(const c10::DataPtr& data);
BlockPtr pinned_block_of(const at::Tensor& t);
BlockPtr find_pinned(const void* address);

// Whether the end of this storage frees its block; not so for one that was cut from another.
bool is_tenancy(const c10::DataPtr& data);

// DataPtr for a block: a tenancy (its end frees the block) or a mere alias (its end does nothing).
c10::DataPtr make_tenancy(BlockPtr block, c10::Device device);
c10::DataPtr make_pinned_tenancy(BlockPtr block);

// A CPU tensor over the same bytes, for kernels. It keeps the block, not torch's storage: see Block.
at::Tensor host_alias(const at::Tensor& t);
// A device tensor over `base`'s storage with the geometry of a view that was made on a host alias.
at::Tensor device_view(const at::Tensor& base, const at::Tensor& host_view);

Operand operand(const at::Tensor& t, bool write);

// Visit the tensors in an operator's argument.
template <class F>
void each_tensor(const c10::IValue& value, const F& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector()) visit(t);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
      if (t) visit(*t);
  }
}

}  // namespace zerolap_sim
