// The few places where the runtime meets the interpreter.
#pragma once

namespace zerolap_sim {

void register_python();     // how to take a stack, and how to wait without the GIL
void clear_python_error();  // after a C++ exception that came out of Python and is not passed on

}  // namespace zerolap_sim
