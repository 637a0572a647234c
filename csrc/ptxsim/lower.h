// SPDX-License-Identifier: Apache-2.0
// Statements to instructions: register cells, symbols, constants, calls. One lowering function per
// row group of isa.def, next to the handlers it chooses from.
#ifndef PTXSIM_LOWER_H_
#define PTXSIM_LOWER_H_

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "isa.h"
#include "machine.h"
#include "ptx.h"

namespace ptxsim {

// Address of a module-scope .global/.const variable in host memory.
using GlobalResolver = std::function<uint64_t(const std::string& name)>;

// Lowers one entry function; throws SimError naming module, line and instruction.
std::unique_ptr<Kernel> lower_kernel(const std::shared_ptr<Module>& module, const std::string& name,
                                     const GlobalResolver& resolve, int device);
// Checks every instruction of every function of a module; returns "line: message" for what cannot
// be lowered.
std::vector<std::string> check_module(const std::shared_ptr<Module>& module, int device);

// An address operand: cell with the base (32- or 64-bit per lane) plus a constant.
struct Address {
  uint32_t cell = 0;
  bool wide = true;
  bool uniform_param = false;  // entry parameter: the same for all lanes
  int64_t offset = 0;
  bool local = false;  // a .local variable or call parameter
};

class Lower {
 public:
  const Stmt* s = nullptr;
  Match m;

  const std::string& mod(size_t group) const { return m.groups[group]; }
  bool has(const char* x) const { return m.has(x); }
  // The i-th modifier that names a type, and how many there are.
  Type type(int i = 0) const;
  size_t count() const { return s->operands.size(); }
  const Operand& op(size_t i) const { return s->operands[i]; }

  // Cell of a source of the given width; immediates and symbols become constants.
  uint32_t src(const Operand& o, Type t);
  uint32_t src(size_t i, Type t) { return src(op(i), t); }
  uint32_t pred(const Operand& o, bool* negated);  // predicate source; immediates allowed
  uint32_t dst(const Operand& o, Type t);          // the sink writes to a scratch cell
  uint32_t dst(size_t i, Type t) { return dst(op(i), t); }
  // ld/st/cvt: the register may be wider than the type. *cell_bits = width of its cell.
  uint32_t src_loose(const Operand& o, Type t, uint8_t* cell_bits);
  uint32_t dst_loose(const Operand& o, Type t, uint8_t* cell_bits);
  bool is_sink(size_t i) const { return op(i).kind == Operand::kSink; }
  Type reg_type(const Operand& o) const;  // of a register operand
  Address address(const Operand& o, bool shared_space);
  Address address(size_t i, bool shared_space = false) { return address(op(i), shared_space); }
  int64_t immediate(const Operand& o);  // must be a constant
  int64_t immediate(size_t i) { return immediate(op(i)); }
  uint32_t constant(uint64_t value, int bytes);  // bytes per lane: 2, 4, 8
  uint32_t preset(Preset::Kind kind, int bytes, uint64_t value);
  uint32_t scratch(Type t);
  std::vector<uint32_t> vec(const Operand& o, Type t, bool is_dst);  // {..} or a single operand

  Insn& emit(Handler fn);
  Insn& last() { return code_.back(); }
  uint32_t carry_cell();  // predicate cell of the carry flag
  template <class T>
  T* extra() {
    auto p = std::make_unique<T>();
    T* raw = p.get();
    k_->extras.push_back(std::move(p));
    return raw;
  }
  void label_fixup(Insn& insn, const std::string& label);
  std::vector<uint32_t>* jump_table(const std::string& list);
  void call();
  void ret();
  [[noreturn]] void fail(const std::string& text) const;
  [[noreturn]] void unsupported(const std::string& text) const;

  // Driver.
  Lower(const std::shared_ptr<Module>& module, const GlobalResolver& resolve, int device);
  std::unique_ptr<Kernel> run(const Function& f);
  void check(const Function& f, std::vector<std::string>* messages);

 private:
  struct Instance {  // one function body, with its cells
    Body body;
    const Function* f = nullptr;
    std::vector<uint32_t> cells;                        // by register
    std::vector<uint32_t> var_cells;                    // by body variable: cell with its address
    std::unordered_map<std::string, uint32_t> formals;  // name -> address cell (.func parameters)
  };
  struct Frame {  // one (possibly inlined) activation
    Instance* inst;
    std::vector<uint32_t> start;    // first insn of each statement
    std::vector<uint32_t> returns;  // insns that jump to the end
    struct Fix {
      uint32_t insn;
      int stmt;
    };
    std::vector<Fix> fixes;
    struct TableFix {
      std::vector<uint32_t>* table;
      std::vector<int> stmts;
    };
    std::vector<TableFix> tables;
  };
  uint32_t alloc_cell(Type t);
  void lower_body(Frame& frame);
  uint32_t symbol(const Operand& o, int bytes);
  uint32_t special(const std::string& name, int bytes, bool* found);
  uint32_t variable_cell(Instance& inst, int index);
  uint32_t shared_offset(const std::string& name, const Variable& v);
  uint32_t local_cell(uint64_t size, uint32_t align);

  std::shared_ptr<Module> module_;
  GlobalResolver resolve_;
  void require_device();  // fails when the simulated device lacks the matched form
  int device_;
  std::unique_ptr<Kernel> k_;
  Frame* frame_ = nullptr;
  std::unordered_map<std::string, std::unique_ptr<Instance>> instances_;
  std::vector<std::string> call_stack_;
  std::map<std::pair<uint64_t, int>, uint32_t> constants_;
  std::map<std::pair<uint64_t, int>, uint32_t> specials_;
  std::map<std::string, uint32_t> shared_;  // static shared variables
  struct DynamicShared {
    uint32_t preset;
  };
  std::vector<DynamicShared> dynamic_;
  std::unordered_map<std::string, uint32_t> entry_params_;
  std::vector<Insn> code_;
  uint32_t carry_ = 0;
  const Function* entry_ = nullptr;
};

int cell_bytes(Type t);

}  // namespace ptxsim

#endif  // PTXSIM_LOWER_H_
