// What differs between versions of torch, here and nowhere else in these sources.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/version.h>

#include <string>
#include <utility>

#define TORCH_IS_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

// Of a member that only newer versions of the base class have; in older ones it is a member like any other.
#define MAY_OVERRIDE

namespace zerolap_sim {

// Older versions promise that these do not throw, and whoever overrides them must promise it, too.
inline constexpr bool streams_cannot_throw = noexcept(
    std::declval<const c10::impl::DeviceGuardImplInterface&>().getStream(std::declval<c10::Device>()));

#if TORCH_IS_AT_LEAST(2, 9)
using c10::DeviceAllocator;
#else  // torch.accelerator has no memory statistics; those of the device's own module need none of it
using DeviceAllocator = c10::Allocator;
#endif

// What Python sees as torch.AcceleratorError, or as RuntimeError where torch has no such class.
[[noreturn]] inline void raise_device_error(c10::SourceLocation where, const std::string& message) {
#if TORCH_IS_AT_LEAST(2, 8)
  throw c10::AcceleratorError(where, 1, message);
#else
  throw c10::Error(where, message);
#endif
}

}  // namespace zerolap_sim
