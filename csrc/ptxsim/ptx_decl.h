// SPDX-License-Identifier: Apache-2.0
#ifndef PTXSIM_PTX_DECL_H_
#define PTXSIM_PTX_DECL_H_

#include <string>

#include "lexer.h"
#include "ptx.h"

namespace ptxsim {

// "[.align n] .type name[dims]" behind the state space; stops before '=', ',', ')' or ';'.
Variable parse_variable(Lexer& lex, const std::string& space);

}  // namespace ptxsim

#endif  // PTXSIM_PTX_DECL_H_
