// Registration with torch: allocators, device guard and accelerator hooks.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "device.h"
#include "versions.h"

namespace zerolap_sim {

using c10::Device;
using c10::DeviceIndex;

static Runtime& rt() { return Runtime::get(); }
static Device device(int index) { return Device(kDeviceType, static_cast<DeviceIndex>(index)); }
static int index_of(Device d) { return d.has_index() ? d.index() : current_device(); }
static Stream& find(const c10::Stream& s) { return rt().stream(s.device_index(), s.id()); }
static c10::Stream wrap(const Stream& s) {
  return c10::Stream(c10::Stream::UNSAFE, device(s.label.device), s.label.id);
}

// ---- memory ----------------------------------------------------------------------------------------------------------

namespace {

struct Allocator final : DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    const int index = current_device();
    return make_tenancy(rt().allocate(size, current_stream(index)), device(index));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override {
    rt().synchronize(current_stream(current_device()));
    std::memcpy(to, from, size);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) MAY_OVERRIDE {
    if (is_tenancy(data)) rt().record_use(block_of(data), find(stream));  // or else nothing happens, as on CUDA
  }
#if TORCH_IS_AT_LEAST(2, 9)
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& bytes = stats.allocated_bytes[0];  // [0] is the aggregate over pools
    bytes.current = rt().bytes_in_use(index);
    bytes.peak = rt().peak_bytes(index);
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex index) override { rt().reset_peak(index); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) MAY_OVERRIDE {
    const size_t total = size_t{16} << 30;  // no card has this memory; a round number that nobody takes for a fact
    return {total - static_cast<size_t>(rt().bytes_in_use(index)), total};
  }
#endif
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override { return make_pinned_tenancy(rt().allocate_pinned(size)); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

Allocator the_allocator;
PinnedAllocator the_pinned_allocator;

// ---- events and streams ----------------------------------------------------------------------------------------------

struct Event {
  std::mutex mutex;
  MarkPtr latest;  // a wait captures the latest recording, as on CUDA
};

MarkPtr latest(void* event) {
  if (!event) return nullptr;
  auto* e = static_cast<Event*>(event);
  std::lock_guard<std::mutex> lock(e->mutex);
  return e->latest;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(rt().num_devices()); }
  Device exchangeDevice(Device d) const override { return device(exchange_device(d.index())); }
  Device getDevice() const override { return device(current_device()); }
  void setDevice(Device d) const override { exchange_device(index_of(d)); }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0 && d.index() < rt().num_devices()) exchange_device(d.index());
  }

  c10::Stream getStream(Device d) const noexcept(streams_cannot_throw) override { return wrap(current_stream(index_of(d))); }
  c10::Stream getDefaultStream(Device d) const override { return wrap(rt().stream(index_of(d), 0)); }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return wrap(rt().pool_stream(index_of(d))); }
  c10::Stream getNewStream(Device d, int) const override { return wrap(rt().new_stream(index_of(d))); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept(streams_cannot_throw) override {
    find(s);  // raises for a stream that does not exist
    const int64_t before = exchange_stream(s.device_index(), s.id());
    return wrap(rt().stream(s.device_index(), before));
  }
  void* getStreamNativeHandle(const c10::Stream s) const MAY_OVERRIDE { return &find(s); }
  bool queryStream(const c10::Stream& s) const override { return rt().query(find(s)); }
  void synchronizeStream(const c10::Stream& s) const override { rt().synchronize(find(s)); }
  void synchronizeDevice(const DeviceIndex index) const override {
    rt().synchronize_device(index < 0 ? current_device() : index);
  }

  void record(void** event, const c10::Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    auto* e = static_cast<Event*>(*event);
    auto mark = rt().record(find(s));
    std::lock_guard<std::mutex> lock(e->mutex);
    e->latest = std::move(mark);
  }
  void block(void* event, const c10::Stream& s) const override {
    if (auto mark = latest(event)) rt().wait(find(s), mark);  // an event never recorded holds nobody up, as on CUDA
  }
  bool queryEvent(void* event) const override {
    auto mark = latest(event);
    return !mark || rt().query(mark);
  }
  void synchronizeEvent(void* event) const override {
    if (auto mark = latest(event)) rt().synchronize(mark);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    auto start = latest(from), end = latest(to);
    TORCH_CHECK(start && end, "simulated device: both events must be recorded before their time is asked for");
    TORCH_CHECK(start->is_set() && end->is_set(), "simulated device: both events must be complete; synchronize first");
    return std::chrono::duration<double, std::milli>(end->time() - start->time()).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    the_allocator.recordStream(data, s);
  }
};

// ---- hooks -----------------------------------------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const MAY_OVERRIDE { return true; }
  bool isAvailable() const MAY_OVERRIDE { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(rt().num_devices()); }
  void setCurrentDevice(DeviceIndex index) const override { exchange_device(index); }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(current_device()); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return static_cast<DeviceIndex>(index < 0 ? current_device() : exchange_device(index));
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* address) const override { return find_pinned(address) != nullptr; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &the_pinned_allocator; }
  Device getDeviceFromPtr(void*) const override { return device(current_device()); }
  // The device draws from the CPU's generator, see [Note: random numbers] in operators.cpp.
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const MAY_OVERRIDE { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    auto fresh = the_allocator.allocate(size);
    const size_t kept = std::min(size, storage.nbytes());
    if (kept && storage.data_ptr().get()) {
      auto from = block_of(storage.data_ptr()), to = block_of(fresh);
      auto bytes = [&](const BlockPtr& block, bool write) -> Operand {
        const auto start = reinterpret_cast<uintptr_t>(block->data);
        return {block, {start, start + kept, nullptr}, {{static_cast<int64_t>(kept)}, "Byte"}, write};
      };
      rt().launch(current_stream(storage.device().index()), "resize storage", {bytes(from, false), bytes(to, true)},
                  [from, to, kept] { std::memcpy(to->data, from->data, kept); });
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

}  // namespace

c10::Allocator* allocator() { return &the_allocator; }

REGISTER_ALLOCATOR(kDeviceType, &the_allocator)
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

void register_device() {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  // MKL and oneDNN do not pass through parallel_for, whose first call would set this up.
  rt().on_worker_start = [] { at::init_num_threads(); };
}

}  // namespace zerolap_sim
