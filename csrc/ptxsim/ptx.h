// SPDX-License-Identifier: Apache-2.0
// PTX text to statements: lexer, declarations, scopes. Nothing here knows what an instruction
// means.
#ifndef PTXSIM_PTX_H_
#define PTXSIM_PTX_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base.h"

namespace ptxsim {

// A fundamental type: kind 'b' bits, 'u', 's', 'f', 'p' predicate, and 'h' for brain floats; packed
// = lanes inside the register.
struct Type {
  char kind = 'b';
  uint16_t bits = 32;  // whole value, packed types included
  uint8_t packed = 1;
  int bytes() const { return bits / 8; }
};
// Parses "u32", "f16x2", "pred", ...; false when the name is no type of a register, memory operand
// or arithmetic instruction.
bool parse_type(const std::string& name, Type* type);

struct Operand {
  enum Kind : uint8_t {
    kReg,   // reg
    kName,  // symbol, label or special register: name (+ imm as offset)
    kInt,   // imm
    kF32,   // imm holds the bits
    kF64,
    kAddr,   // [elems[0] + imm], further elems: coordinate vector, im2col offsets
    kVec,    // {elems}
    kPair,   // elems[0] | elems[1]
    kParen,  // (elems), of call
    kSink,   // _
  };
  Kind kind = kInt;
  bool negated = false;  // !p
  int reg = -1;
  int64_t imm = 0;
  std::string name;
  std::vector<Operand> elems;
};

struct Loc {
  int file = 0, line = 0;
  int at_file = 0, at_line = 0;  // inlined_at, 0 when absent
};

struct Stmt {
  int line = 0;  // line of the PTX text
  int loc = -1;  // index into Body::locs
  int scope = 0;
  int guard = -1;  // register, -1 = none
  bool guard_not = false;
  std::string op;                 // up to the first '.'
  std::vector<std::string> mods;  // the rest, split at '.', "a::b" kept whole
  std::vector<Operand> operands;
  std::string opcode() const;
};

struct Variable {
  std::string name;
  std::string space;  // "global", "const", "shared", "local", "param"
  Type type;
  uint64_t size = 0;  // bytes; 0 for unsized extern arrays
  uint32_t align = 1;
  bool is_extern = false;
  int line = 0;
  std::vector<uint8_t> init;  // empty = zero
  struct Reloc {
    uint64_t offset;
    uint32_t bytes;
    std::string symbol;
    int64_t addend;
    bool generic;
  };
  std::vector<Reloc> relocs;
};

struct Register {
  std::string name;
  Type type;
};

struct LexScope {
  int parent = -1;
  std::unordered_map<std::string, int> labels;     // statement index
  std::unordered_map<std::string, int> variables;  // Body::variables
  std::unordered_map<std::string, int> regs;
  struct Range {
    int first, count;
  };
  std::unordered_map<std::string, Range> ranges;  // %r<5>
  std::unordered_map<std::string, std::vector<std::string>> branch_targets;
};

struct Body {
  std::vector<Stmt> stmts;
  std::vector<LexScope> scopes;
  std::vector<Register> regs;
  std::vector<Variable> variables;
  std::vector<Loc> locs;
  int find_label(int scope, const std::string& name) const;
  int find_variable(int scope, const std::string& name) const;
  const std::vector<std::string>* find_targets(int scope, const std::string& name) const;
};

struct Function {
  std::string name;
  bool is_entry = false;
  std::vector<Variable> params, returns;
  std::vector<Register> reg_params;  // unsupported, kept for the message
  bool declared_only = true;
  int line = 0;
  size_t body_begin = 0, body_end = 0;
  int body_line = 0;
  uint32_t reqnctapercluster[3] = {0, 0, 0};
  uint32_t maxntid[3] = {0, 0, 0}, reqntid[3] = {0, 0, 0};
  bool explicit_cluster = false;
  int maxnreg = 0, minnctapersm = 0;
};

struct Module {
  std::string name;  // for messages
  std::string text;
  int version_major = 0, version_minor = 0;
  std::string target;  // "sm_100a"
  std::map<std::string, Function> functions;
  std::vector<Variable> variables;  // module scope
  std::unordered_map<std::string, int> variable_index;
  std::map<int, std::string> files;
  mutable std::vector<size_t> line_begin;  // source_line() fills it at its first call
  int arch() const;                        // 100 of sm_100a
};

// Scans a whole module; bodies are parsed on demand. Throws SimError(kInvalidPtx) naming module and
// line.
std::shared_ptr<Module> parse_module(std::string text, const std::string& name);
Body parse_body(const Module& module, const Function& function);
// PTX text of a statement, for reports.
std::string source_line(const Module& module, int line);

}  // namespace ptxsim

#endif  // PTXSIM_PTX_H_
