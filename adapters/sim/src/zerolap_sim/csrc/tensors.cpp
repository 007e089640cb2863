// Aliases and regions, see tensors.h.
#include "tensors.h"

#include <algorithm>

namespace zerolap_sim {

// ---- who owns a DataPtr ----------------------------------------------------------------------------------------------

namespace {

std::mutex tenants_mutex;
std::map<uintptr_t, std::weak_ptr<Block>> tenants;  // by address, of the device's memory and of pinned memory

void* enter(const BlockPtr& block) {
  std::lock_guard<std::mutex> lock(tenants_mutex);
  tenants[reinterpret_cast<uintptr_t>(block->data)] = block;
  return block->data;
}

void leave(const BlockPtr& block) {
  std::lock_guard<std::mutex> lock(tenants_mutex);
  tenants.erase(reinterpret_cast<uintptr_t>(block->data));
}

// The block that an address lies in, or null.
BlockPtr find_block(const void* address) {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(tenants_mutex);
  auto found = tenants.upper_bound(wanted);
  if (found == tenants.begin()) return nullptr;
  auto block = (--found)->second.lock();
  return block && wanted < found->first + std::max<size_t>(block->size, 1) ? block : nullptr;
}

void end_tenancy(void* context) {
  auto* block = static_cast<BlockPtr*>(context);
  leave(*block);
  Runtime::get().release(*block);
  delete block;
}

void end_pinned_tenancy(void* context) {
  auto* block = static_cast<BlockPtr*>(context);
  leave(*block);
  delete block;
}

void end_alias(void* context) { delete static_cast<BlockPtr*>(context); }

}  // namespace

c10::DataPtr make_tenancy(BlockPtr block, c10::Device device) {
  void* data = enter(block);
  return {data, new BlockPtr(std::move(block)), &end_tenancy, device};
}

c10::DataPtr make_pinned_tenancy(BlockPtr block) {
  void* data = enter(block);
  return {data, new BlockPtr(std::move(block)), &end_pinned_tenancy, c10::Device(c10::kCPU)};
}

bool is_tenancy(const c10::DataPtr& data) { return data.get_deleter() == &end_tenancy; }

BlockPtr block_of(const c10::DataPtr& data) {
  if (is_tenancy(data)) return *static_cast<BlockPtr*>(data.get_context());
  BlockPtr block = find_block(data.get());  // of a storage that was cut from another one
  TORCH_CHECK(block && !block->is_pinned,
              "simulated device: this storage was not allocated by the simulated device (an external or empty storage?)");
  return block;
}

BlockPtr find_pinned(const void* address) {
  BlockPtr block = find_block(address);
  return block && block->is_pinned ? block : nullptr;
}

BlockPtr pinned_block_of(const at::Tensor& t) {
  if (!t.defined() || !t.device().is_cpu() || !t.has_storage()) return nullptr;
  return find_pinned(t.storage().data());
}

// ---- aliases ---------------------------------------------------------------------------------------------------------

at::Tensor host_alias(const at::Tensor& t) {
  BlockPtr block = is_on_device(t) ? block_of(t.storage().data_ptr()) : pinned_block_of(t);
  TORCH_INTERNAL_ASSERT(block, "simulated device: only device tensors and pinned tensors have aliases");
  // Of torch's storage, not of the block: a storage may begin inside of one.
  auto* data = const_cast<void*>(t.storage().data());
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(),
                       c10::DataPtr(data, new BlockPtr(std::move(block)), &end_alias, c10::Device(c10::kCPU)),
                       /*allocator=*/nullptr, /*resizable=*/false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                        c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (t.is_conj()) alias._set_conj(true);
  if (t.is_neg()) alias._set_neg(true);
  return alias;
}

at::Tensor device_view(const at::Tensor& base, const at::Tensor& host_view) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                       base.key_set(), host_view.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(host_view.sizes(), host_view.strides(),
                                                    host_view.storage_offset());
  if (host_view.is_conj() != view.is_conj()) view._set_conj(host_view.is_conj());
  if (host_view.is_neg() != view.is_neg()) view._set_neg(host_view.is_neg());
  return view;
}

// ---- regions ---------------------------------------------------------------------------------------------------------

static Region region_of(const at::Tensor& t, uintptr_t start) {
  if (t.numel() == 0) return {start, start, nullptr};
  // Dimensions from the innermost stride outwards, without those that do not move.
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) > 1 && t.stride(d) > 0) dims.emplace_back(t.stride(d), t.size(d));
  std::sort(dims.begin(), dims.end());
  int64_t run = 1;  // elements in one unbroken run
  size_t next = 0;
  for (; next < dims.size() && dims[next].first <= run; ++next)
    run = std::max(run, dims[next].first * (dims[next].second - 1) + run);
  int64_t last = run, num_runs = 1;
  for (size_t d = next; d < dims.size(); ++d) {
    last += dims[d].first * (dims[d].second - 1);
    num_runs *= dims[d].second;
  }
  const auto item = static_cast<uintptr_t>(t.itemsize());
  const uintptr_t lo = start + t.storage_offset() * item;
  Region region{lo, lo + last * item, nullptr};
  if (num_runs == 1 || num_runs > static_cast<int64_t>(Region::kMaxRuns)) return region;
  std::vector<Region::Run> runs{{lo, lo + run * item}};
  for (size_t d = next; d < dims.size(); ++d) {
    const size_t before = runs.size();
    for (int64_t i = 1; i < dims[d].second; ++i)
      for (size_t k = 0; k < before; ++k) {
        const uintptr_t shift = i * dims[d].first * item;
        runs.emplace_back(runs[k].first + shift, runs[k].second + shift);
      }
  }
  std::sort(runs.begin(), runs.end());
  region.runs = std::make_shared<const std::vector<Region::Run>>(std::move(runs));
  return region;
}

Operand operand(const at::Tensor& t, bool write) {
  BlockPtr block = is_on_device(t) ? block_of(t.storage().data_ptr()) : pinned_block_of(t);
  TORCH_INTERNAL_ASSERT(block, "simulated device: only device tensors and pinned tensors are operands");
  const auto start = reinterpret_cast<uintptr_t>(t.storage().data());
  return {block, region_of(t, start), {t.sizes().vec(), c10::toString(t.scalar_type())}, write};
}

}  // namespace zerolap_sim
