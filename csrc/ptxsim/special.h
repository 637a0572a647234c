// SPDX-License-Identifier: Apache-2.0
#ifndef PTXSIM_SPECIAL_H_
#define PTXSIM_SPECIAL_H_

#include <string>

#include "machine.h"

namespace ptxsim {

// Id (enum Special) of a special register, -1 if the name is none.
int special_register(const std::string& name);
// Value for one lane of a warp that is about to start.
uint64_t special_value(const Warp& w, int id, int lane);

}  // namespace ptxsim

#endif  // PTXSIM_SPECIAL_H_
