// SPDX-License-Identifier: Apache-2.0
#include "lower.h"

#include <algorithm>

#include "special.h"

namespace ptxsim {

int cell_bytes(Type t) {
  if (t.kind == 'p') return 64;
  if (t.bits <= 16) return 2 * kLanes;
  if (t.bits == 32) return 4 * kLanes;
  if (t.bits == 64) return 8 * kLanes;
  return 16 * kLanes;
}

Lower::Lower(const std::shared_ptr<Module>& module, const GlobalResolver& resolve, int device)
    : module_(module), resolve_(resolve), device_(device) {}

void Lower::fail(const std::string& text) const {
  throw SimError(Err::kInvalidPtx, format("%s:%d: %s  [%s]", module_->name.c_str(), s ? s->line : 0,
                                          text.c_str(), s ? s->opcode().c_str() : ""));
}

void Lower::unsupported(const std::string& text) const {
  throw SimError(Err::kNotSupported,
                 format("%s:%d: not supported by the simulator: %s  [%s]", module_->name.c_str(),
                        s ? s->line : 0, text.c_str(), s ? s->opcode().c_str() : ""));
}

Type Lower::type(int i) const {
  Type t;
  for (auto& g : m.groups) {
    if (!g.empty() && parse_type(g, &t) && i-- == 0) return t;
  }
  fail("internal: the instruction has no such type");
}

uint32_t Lower::alloc_cell(Type t) {
  uint32_t at = k_->frame_bytes;
  k_->frame_bytes += static_cast<uint32_t>(cell_bytes(t));
  if (k_->frame_bytes > (1u << 30)) fail("register frame too large");
  return at;
}

uint32_t Lower::scratch(Type t) { return alloc_cell(t); }

uint32_t Lower::constant(uint64_t value, int bytes) {
  if (bytes < 8) value &= (1ull << (8 * bytes)) - 1;
  auto key = std::make_pair(value, bytes);
  auto it = constants_.find(key);
  if (it != constants_.end()) return it->second;
  uint32_t at = preset(Preset::kValue, bytes, value);
  constants_[key] = at;
  return at;
}

uint32_t Lower::preset(Preset::Kind kind, int bytes, uint64_t value) {
  Type t;
  t.bits = static_cast<uint16_t>(bytes * 8);
  if (bytes == 0) t.kind = 'p';
  uint32_t at = alloc_cell(t);
  k_->presets.push_back({at, static_cast<uint8_t>(bytes), kind, value});
  return at;
}

Type Lower::reg_type(const Operand& o) const {
  if (o.kind != Operand::kReg) fail("expected a register");
  return frame_->inst->body.regs[o.reg].type;
}

namespace {

int width_class(Type t) { return t.kind == 'p' ? 0 : t.bits <= 16 ? 16 : t.bits; }

uint64_t float_literal(const Operand& o, Type t) {
  double v = o.kind == Operand::kF64 ? bit_cast<double>(o.imm)
                                     : bit_cast<float>(static_cast<uint32_t>(o.imm));
  if (t.bits == 64)
    return o.kind == Operand::kF64 ? static_cast<uint64_t>(o.imm) : bit_cast<uint64_t>(v);
  if (o.kind == Operand::kF32) return static_cast<uint32_t>(o.imm);
  return bit_cast<uint32_t>(static_cast<float>(v));
}

}  // namespace

uint32_t Lower::src(const Operand& o, Type t) {
  switch (o.kind) {
    case Operand::kReg: {
      Type r = reg_type(o);
      if (width_class(r) != width_class(t)) {
        fail(format("register %s has %d bits, the instruction needs %d",
                    frame_->inst->body.regs[o.reg].name.c_str(), r.bits, t.bits));
      }
      return frame_->inst->cells[o.reg];
    }
    case Operand::kInt: {
      uint64_t v = static_cast<uint64_t>(o.imm);
      if (t.kind == 'f' && t.packed == 1 && t.bits == 32 && o.imm != 0)
        fail("integer literal for a float operand");
      if (t.bits == 128) fail("128-bit immediates do not exist");
      if (t.bits <= 8) v &= 0xff;
      return constant(v, t.bits <= 16 ? 2 : t.bits / 8);
    }
    case Operand::kF32:
    case Operand::kF64:
      if (t.bits < 32) fail("float literal for a 16-bit operand");
      return constant(float_literal(o, t), t.bits / 8);
    case Operand::kName:
      return symbol(o, t.bits <= 16 ? 2 : t.bits / 8);
    case Operand::kVec:
    default:
      fail("unexpected operand");
  }
}

uint32_t Lower::pred(const Operand& o, bool* negated) {
  *negated = o.negated;
  if (o.kind == Operand::kReg) {
    if (reg_type(o).kind != 'p') fail("expected a predicate");
    return frame_->inst->cells[o.reg];
  }
  if (o.kind == Operand::kInt) return preset(Preset::kValue, 0, o.imm ? kFull : 0);
  fail("expected a predicate");
}

uint32_t Lower::dst(const Operand& o, Type t) {
  if (o.kind == Operand::kSink) return scratch(t);
  if (o.kind == Operand::kName) fail("undeclared register " + o.name);
  if (o.kind != Operand::kReg) fail("destination is not a register");
  Type r = reg_type(o);
  if (width_class(r) != width_class(t)) {
    fail(format("register %s has %d bits, the instruction writes %d",
                frame_->inst->body.regs[o.reg].name.c_str(), r.bits, t.bits));
  }
  return frame_->inst->cells[o.reg];
}

int64_t Lower::immediate(const Operand& o) {
  if (o.kind != Operand::kInt) fail("expected an integer constant");
  return o.imm;
}

std::vector<uint32_t> Lower::vec(const Operand& o, Type t, bool is_dst) {
  std::vector<uint32_t> cells;
  if (o.kind != Operand::kVec) {
    cells.push_back(is_dst ? dst(o, t) : src(o, t));
    return cells;
  }
  for (auto& e : o.elems) cells.push_back(is_dst ? dst(e, t) : src(e, t));
  return cells;
}

uint32_t Lower::special(const std::string& name, int bytes, bool* found) {
  int id = special_register(name);
  *found = id >= 0;
  if (id < 0) return 0;
  if (id >= kSpecialFixed) fail("special register " + name + " can be read by mov only");
  auto key = std::make_pair(static_cast<uint64_t>(id), bytes);
  auto it = specials_.find(key);
  if (it != specials_.end()) return it->second;
  uint32_t at = preset(Preset::kSpecial, id == kIsExplicitCluster && bytes == 0 ? 0 : bytes,
                       static_cast<uint64_t>(id));
  specials_[key] = at;
  return at;
}

uint32_t Lower::shared_offset(const std::string& name, const Variable& v) {
  auto it = shared_.find(name);
  if (it != shared_.end()) return it->second;
  uint32_t at = (k_->smem_static + v.align - 1) / v.align * v.align;
  if (at + v.size > (1u << 20)) fail("static shared memory too large");
  k_->smem_static = static_cast<uint32_t>(at + v.size);
  shared_[name] = at;
  return at;
}

uint32_t Lower::local_cell(uint64_t size, uint32_t align) {
  align = std::max<uint32_t>(align, 8);
  uint32_t at = (k_->local_bytes + align - 1) / align * align;
  k_->local_bytes = static_cast<uint32_t>(at + size);
  return preset(Preset::kLocal, 8, at);
}

uint32_t Lower::variable_cell(Instance& inst, int index) {
  const Variable& v = inst.body.variables[index];
  if (v.space == "global" || v.space == "const")
    unsupported("function-scope ." + v.space + " variable " + v.name);
  if (!inst.var_cells[index]) inst.var_cells[index] = local_cell(v.size, v.align);
  return inst.var_cells[index];
}

// Address of a symbol as a constant cell of 4 or 8 bytes per lane.
uint32_t Lower::symbol(const Operand& o, int bytes) {
  Instance& inst = *frame_->inst;
  bool found = false;
  if (o.name[0] == '%' || o.name == "WARP_SZ") {
    if (o.name == "WARP_SZ") return constant(32, bytes);
    uint32_t cell = special(o.name, bytes, &found);
    if (found) return cell;
    fail("undeclared register " + o.name);
  }
  auto with_offset = [&](uint32_t base) {
    if (!o.imm) return base;
    // The base is a preset of this kernel; make a second one that includes the offset.
    for (auto& p : k_->presets) {
      if (p.offset == base) return preset(p.kind, p.bytes, p.value + static_cast<uint64_t>(o.imm));
    }
    fail("symbol plus offset is not supported here");
  };
  int index = inst.body.find_variable(s ? s->scope : 0, o.name);
  if (index >= 0) {
    const Variable& v = inst.body.variables[index];
    if (v.space == "shared") {
      uint32_t at = shared_offset(inst.f->name + "::" + std::to_string(index) + "::" + o.name, v);
      return preset(Preset::kShared, bytes, at + static_cast<uint64_t>(o.imm));
    }
    if (bytes != 8) fail("the address of " + o.name + " needs 64 bits");
    return with_offset(variable_cell(inst, index));
  }
  auto formal = inst.formals.find(o.name);
  if (formal != inst.formals.end()) return with_offset(formal->second);
  if (inst.f == entry_) {
    auto p = entry_params_.find(o.name);
    if (p != entry_params_.end()) {
      if (bytes != 8) fail("the address of a parameter needs 64 bits");
      return preset(Preset::kParam, 8, k_->params[p->second].offset + static_cast<uint64_t>(o.imm));
    }
  }
  auto var = module_->variable_index.find(o.name);
  if (var != module_->variable_index.end()) {
    const Variable& v = module_->variables[var->second];
    if (v.space == "shared") {
      if (v.is_extern && v.size == 0) {
        // Dynamic shared memory begins behind all static variables, whose size is known at the end.
        k_->smem_dynamic_align = std::max(k_->smem_dynamic_align, v.align);
        uint32_t cell = preset(Preset::kShared, bytes, static_cast<uint64_t>(o.imm));
        dynamic_.push_back({static_cast<uint32_t>(k_->presets.size() - 1)});
        return cell;
      }
      return preset(Preset::kShared, bytes,
                    shared_offset(o.name, v) + static_cast<uint64_t>(o.imm));
    }
    if (bytes != 8) fail("the address of " + o.name + " needs 64 bits");
    return constant(resolve_(o.name) + static_cast<uint64_t>(o.imm), 8);
  }
  if (module_->functions.count(o.name)) unsupported("address of function " + o.name);
  fail("undeclared symbol " + o.name);
}

Address Lower::address(const Operand& o, bool shared_space) {
  Address a;
  if (o.kind != Operand::kAddr) fail("expected an address");
  const Operand& base = o.elems[0];
  a.offset = o.imm;
  if (base.kind == Operand::kReg) {
    Type t = reg_type(base);
    if (t.kind == 'p' || (t.bits != 32 && t.bits != 64))
      fail("address register must have 32 or 64 bits");
    a.wide = t.bits == 64;
    a.cell = frame_->inst->cells[base.reg];
    return a;
  }
  if (base.kind == Operand::kInt) {
    a.cell = constant(static_cast<uint64_t>(base.imm), 8);
    return a;
  }
  if (base.kind != Operand::kName) fail("unsupported address");
  Instance& inst = *frame_->inst;
  int index = inst.body.find_variable(s->scope, base.name);
  if (index >= 0) {
    a.local = inst.body.variables[index].space != "shared";
  } else if (inst.formals.count(base.name)) {
    a.local = true;
  } else if (inst.f == entry_ && entry_params_.count(base.name)) {
    a.uniform_param = true;
  }
  a.wide = !shared_space;
  a.cell = symbol(base, shared_space ? 4 : 8);
  return a;
}

Insn& Lower::emit(Handler fn) {
  Insn i;
  i.fn = fn;
  i.stmt = static_cast<uint32_t>(k_->sources.size() - 1);
  if (s->guard >= 0) {
    i.guard = frame_->inst->cells[s->guard];
    if (s->guard_not) i.flags |= kGuardNot;
  }
  code_.push_back(i);
  return code_.back();
}

uint32_t Lower::carry_cell() {
  if (!carry_) carry_ = alloc_cell(Type{'p', 1, 1});
  return carry_;
}

void Lower::label_fixup(Insn& insn, const std::string& label) {
  int stmt = frame_->inst->body.find_label(s->scope, label);
  if (stmt < 0) fail("undefined label " + label);
  frame_->fixes.push_back({static_cast<uint32_t>(&insn - code_.data()), stmt});
}

std::vector<uint32_t>* Lower::jump_table(const std::string& list) {
  struct Table : Extra {
    std::vector<uint32_t> targets;
  };
  const std::vector<std::string>* labels = frame_->inst->body.find_targets(s->scope, list);
  if (!labels) fail("undefined branch target list " + list);
  Table* t = extra<Table>();
  Frame::TableFix fix;
  fix.table = &t->targets;
  for (auto& l : *labels) {
    int stmt = frame_->inst->body.find_label(s->scope, l);
    if (stmt < 0) fail("undefined label " + l);
    fix.stmts.push_back(stmt);
  }
  t->targets.resize(labels->size());
  frame_->tables.push_back(std::move(fix));
  return &t->targets;
}

Status op_jump(Warp& w, const Insn& i, uint32_t m);
Status op_exit(Warp& w, const Insn& i, uint32_t m);
Status op_vprintf(Warp& w, const Insn& i, uint32_t m);
Status op_assertfail(Warp& w, const Insn& i, uint32_t m);

void Lower::ret() {
  if (call_stack_.size() == 1) {
    emit(op_exit).flags |= kAlwaysRun;
    return;
  }
  Insn& i = emit(op_jump);
  i.flags |= kAlwaysRun;
  frame_->returns.push_back(static_cast<uint32_t>(&i - code_.data()));
}

void Lower::call() {
  // call (ret), f, (args);  call f, (args);  call f;
  size_t i = 0;
  const Operand* rets = nullptr;
  const Operand* args = nullptr;
  if (op(i).kind == Operand::kParen) rets = &op(i++);
  if (i >= count() || op(i).kind != Operand::kName) unsupported("indirect call");
  std::string name = op(i++).name;
  if (i < count()) {
    if (op(i).kind != Operand::kParen) unsupported("indirect call");
    args = &op(i);
  }
  auto cell_of = [&](const Operand& o) {
    if (o.kind != Operand::kName) unsupported("call argument that is not a .param variable");
    return symbol(o, 8);
  };
  if (name == "vprintf" || name == "__assertfail") {
    struct CallArgs : Extra {
      std::vector<uint32_t> cells;
    };
    auto* x = extra<CallArgs>();
    if (args) {
      for (auto& a : args->elems) x->cells.push_back(cell_of(a));
    }
    Insn& insn = emit(name == "vprintf" ? op_vprintf : op_assertfail);
    insn.x = x;
    insn.n = static_cast<uint8_t>(x->cells.size());
    insn.a = x->cells.empty() ? 0 : x->cells[0];
    insn.b = x->cells.size() > 1 ? x->cells[1] : 0;
    insn.c = x->cells.size() > 2 ? x->cells[2] : 0;
    if (rets && !rets->elems.empty()) insn.d = cell_of(rets->elems[0]);
    return;
  }
  auto it = module_->functions.find(name);
  if (it == module_->functions.end()) fail("call of undeclared function " + name);
  const Function& f = it->second;
  if (f.declared_only) unsupported("call of external function " + name);
  if (!f.reg_params.empty()) unsupported("function parameters in registers (" + name + ")");
  if (std::find(call_stack_.begin(), call_stack_.end(), name) != call_stack_.end()) {
    unsupported("recursion through " + name);
  }
  if (s->guard >= 0) {
    // Lanes without the guard jump over the inlined body.
    Insn& skip = emit(op_jump);
    skip.flags ^= kGuardNot;
    skip.flags |= kAlwaysRun;
    skip.imm = -1;
  }
  size_t guard_jump = code_.size();
  auto& slot = instances_[name];
  if (!slot) {
    slot = std::make_unique<Instance>();
    slot->f = &f;
    slot->body = parse_body(*module_, f);
    for (auto& r : slot->body.regs) slot->cells.push_back(alloc_cell(r.type));
    slot->var_cells.resize(slot->body.variables.size());
  }
  slot->formals.clear();
  if ((args ? args->elems.size() : 0) != f.params.size() ||
      (rets ? rets->elems.size() : 0) != f.returns.size()) {
    fail("wrong number of arguments for " + name);
  }
  for (size_t k = 0; k < f.params.size(); ++k)
    slot->formals[f.params[k].name] = cell_of(args->elems[k]);
  for (size_t k = 0; k < f.returns.size(); ++k)
    slot->formals[f.returns[k].name] = cell_of(rets->elems[k]);
  Frame frame;
  frame.inst = slot.get();
  const Stmt* caller = s;
  Match caller_match = m;
  Frame* caller_frame = frame_;
  call_stack_.push_back(name);
  lower_body(frame);
  call_stack_.pop_back();
  frame_ = caller_frame;
  s = caller;
  m = caller_match;
  for (uint32_t r : frame.returns) code_[r].imm = static_cast<int64_t>(code_.size());
  if (s->guard >= 0) code_[guard_jump - 1].imm = static_cast<int64_t>(code_.size());
}

void Lower::lower_body(Frame& frame) {
  frame_ = &frame;
  Body& body = frame.inst->body;
  for (size_t n = 0; n < body.stmts.size(); ++n) {
    frame_ = &frame;
    s = &body.stmts[n];
    frame.start.push_back(static_cast<uint32_t>(code_.size()));
    Source src;
    src.line = s->line;
    if (s->loc >= 0) {
      const Loc& l = body.locs[s->loc];
      src.file = l.file;
      src.cuda_line = l.line;
      src.at_file = l.at_file;
      src.at_line = l.at_line;
    }
    k_->sources.push_back(src);
    std::string why;
    if (!match_isa(*s, &m, &why)) fail(why);
    require_device();
    m.form->fn(*this);
  }
  frame_ = &frame;
  frame.start.push_back(static_cast<uint32_t>(code_.size()));
  if (call_stack_.size() == 1) {  // falling off the end of a kernel is an exit
    Stmt end;
    end.op = "exit";
    end.line = body.stmts.empty() ? 0 : body.stmts.back().line;
    s = &end;
    emit(op_exit).flags |= kAlwaysRun;
    s = nullptr;
  }
  for (auto& f : frame.fixes) code_[f.insn].imm = frame.start[f.stmt];
  for (auto& t : frame.tables) {
    for (size_t i = 0; i < t.stmts.size(); ++i) (*t.table)[i] = frame.start[t.stmts[i]];
  }
}

std::unique_ptr<Kernel> Lower::run(const Function& f) {
  k_ = std::make_unique<Kernel>();
  k_->module = module_;
  k_->name = f.name;
  k_->arch = module_->arch();
  k_->frame_bytes = 64;  // offset 0 means "none"
  entry_ = &f;
  uint32_t at = 0;
  for (auto& p : f.params) {
    at = (at + p.align - 1) / p.align * p.align;
    entry_params_[p.name] = static_cast<uint32_t>(k_->params.size());
    k_->params.push_back({at, static_cast<uint32_t>(p.size), p.align});
    at += static_cast<uint32_t>(p.size);
  }
  k_->param_bytes = at;
  for (int i = 0; i < 3; ++i) k_->cluster[i] = f.reqnctapercluster[i];
  if (f.reqntid[0]) k_->max_threads = f.reqntid[0] * f.reqntid[1] * f.reqntid[2];
  if (f.maxntid[0]) k_->max_threads = f.maxntid[0] * f.maxntid[1] * f.maxntid[2];
  auto inst = std::make_unique<Instance>();
  inst->f = &f;
  inst->body = parse_body(*module_, f);
  for (auto& r : inst->body.regs) inst->cells.push_back(alloc_cell(r.type));
  k_->register_bytes = k_->frame_bytes;
  inst->var_cells.resize(inst->body.variables.size());
  Frame frame;
  frame.inst = inst.get();
  call_stack_.push_back(f.name);
  lower_body(frame);
  call_stack_.pop_back();
  k_->smem_static = (k_->smem_static + k_->smem_dynamic_align - 1) / k_->smem_dynamic_align *
                    k_->smem_dynamic_align;
  for (auto& d : dynamic_) k_->presets[d.preset].value += k_->smem_static;
  k_->code = std::move(code_);
  return std::move(k_);
}

// Sources: "target ISA notes" of each instruction; ptxas refuses the same.
void Lower::require_device() {
  int family = device_ / 10;
  if (m.form->sm > device_)
    fail(format("needs sm_%d, the simulated device is sm_%d", m.form->sm, device_));
  if (s->op == "tcgen05" && family != 10 && family != 11) {
    fail(format("tcgen05 exists on sm_100, sm_103 and sm_110, the simulated device is sm_%d",
                device_));
  }
  if (s->op == "wgmma" && device_ != 90)
    fail(format("wgmma exists on sm_90 only, the simulated device is sm_%d", device_));
  if (s->op == "redux" && has("f32") && family != 10)
    fail(format("redux.f32 exists on sm_100 and sm_103 only, the simulated device is sm_%d",
                device_));
}

void Lower::check(const Function& f, std::vector<std::string>* messages) {
  k_ = std::make_unique<Kernel>();
  k_->frame_bytes = 64;
  entry_ = &f;
  for (auto& p : f.params) {
    entry_params_[p.name] = static_cast<uint32_t>(k_->params.size());
    k_->params.push_back({0, static_cast<uint32_t>(p.size), p.align});
  }
  Instance inst;
  inst.f = &f;
  inst.body = parse_body(*module_, f);
  for (auto& r : inst.body.regs) inst.cells.push_back(alloc_cell(r.type));
  inst.var_cells.resize(inst.body.variables.size());
  if (!f.is_entry) {
    for (auto& p : f.params) inst.formals[p.name] = local_cell(p.size, p.align);
    for (auto& p : f.returns) inst.formals[p.name] = local_cell(p.size, p.align);
  }
  Frame frame;
  frame.inst = &inst;
  call_stack_.push_back(f.name);
  for (auto& stmt : inst.body.stmts) {
    frame_ = &frame;
    s = &stmt;
    k_->sources.push_back({});
    try {
      std::string why;
      if (!match_isa(stmt, &m, &why)) fail(why);
      require_device();
      m.form->fn(*this);
    } catch (const SimError& e) {
      messages->push_back(e.what());
    }
  }
}

std::unique_ptr<Kernel> lower_kernel(const std::shared_ptr<Module>& module, const std::string& name,
                                     const GlobalResolver& resolve, int device) {
  auto it = module->functions.find(name);
  if (it == module->functions.end() || !it->second.is_entry) {
    throw SimError(Err::kInvalidDeviceFunction, module->name + ": no kernel named " + name);
  }
  return Lower(module, resolve, device).run(it->second);
}

std::vector<std::string> check_module(const std::shared_ptr<Module>& module, int device) {
  std::vector<std::string> messages;
  for (auto& f : module->functions) {
    if (f.second.declared_only) continue;
    Lower(module, [](const std::string&) { return 0x1000ull; }, device).check(f.second, &messages);
  }
  return messages;
}

}  // namespace ptxsim
