// SPDX-License-Identifier: Apache-2.0
// The instruction table: matching of opcodes and modifiers, and the lowering interface.
#ifndef PTXSIM_ISA_H_
#define PTXSIM_ISA_H_

#include <initializer_list>
#include <string>
#include <vector>

#include "ptx.h"

namespace ptxsim {

class Lower;
using LowerFn = void (*)(Lower&);

struct Form {
  const char* lowering;
  const char* pattern;
  LowerFn fn;
  int min_operands, max_operands;
  int sm;
  const char* section;
};

// Modifiers by group of the matched pattern; "" where an optional group is absent.
struct Match {
  const Form* form = nullptr;
  std::vector<std::string> groups;
  bool has(const char* mod) const;
};

// Finds the row of an instruction. On failure returns false and explains in *why (unknown opcode,
// unknown modifier, operand count).
bool match_isa(const Stmt& stmt, Match* match, std::string* why);
const std::vector<Form>& isa_table();

}  // namespace ptxsim

#endif  // PTXSIM_ISA_H_
