// What the rest of the extension needs from the registration with torch.
#pragma once

#include <c10/core/DeviceGuard.h>

#include "tensors.h"

namespace zerolap_sim {

void register_device();
void register_autograd_fallback();
c10::Allocator* allocator();

}  // namespace zerolap_sim
