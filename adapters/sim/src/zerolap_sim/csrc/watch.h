// Watching what the host does with pinned memory while streams may be copying from or to it.
#pragma once

namespace zerolap_sim {

// From now on, operators that this thread runs on the CPU are checked if an operand is pinned.
void watch_pinned_memory();

}  // namespace zerolap_sim
