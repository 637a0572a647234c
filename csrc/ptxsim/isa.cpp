// SPDX-License-Identifier: Apache-2.0
#include "isa.h"

#include <unordered_map>

namespace ptxsim {

#define ISA(fn, pattern, lo, hi, sm, section) void low_##fn(Lower&);
#include "isa.def"
#undef ISA

namespace {

const char* type_set(const std::string& name) {
  static const std::unordered_map<std::string, const char*> sets = {
      {"$I", "u16|u32|u64|s16|s32|s64"},
      {"$C", "b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64"},
      {"$M", "b8|b16|b32|b64|b128|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64|f16|bf16|f16x2|bf16x2"},
      {"$CACHE", "ca|cg|cs|lu|cv"},
      {"$EVICT",
       "L1::evict_normal|L1::evict_unchanged|L1::evict_first|L1::evict_last|L1::no_allocate"},
      {"$L2EVICT", "L2::evict_normal|L2::evict_first|L2::evict_last"},
      {"$RND", "rn|rz|rm|rp|rna|rni|rzi|rmi|rpi"},
      {"$CVT", "u8|u16|u32|u64|s8|s16|s32|s64|f16|bf16|f32|f64|tf32"},
      {"$ACC", "f16|f32|s32"},
      {"$MMAT", "f16|bf16|tf32|e4m3|e5m2|e3m2|e2m3|e2m1|u8|s8|u4|s4|b1"},
      {"$COLB",
       "collector::b0::fill|collector::b0::use|collector::b0::lastuse|collector::b0::discard|"
       "collector::b1::fill|"
       "collector::b1::use|collector::b1::lastuse|collector::b1::discard|collector::b2::fill|"
       "collector::b2::use|"
       "collector::b2::lastuse|collector::b2::discard|collector::b3::fill|collector::b3::use|"
       "collector::b3::lastuse|"
       "collector::b3::discard"},
  };
  auto it = sets.find(name);
  return it == sets.end() ? nullptr : it->second;
}

struct Group {
  bool optional = false;
  std::vector<std::string> choices;
  bool wgmma_shape = false;
};

struct Compiled {
  const Form* form;
  std::vector<Group> groups;
};

void add_choices(const std::string& text, Group* g) {
  size_t pos = 0;
  while (pos <= text.size()) {
    size_t bar = text.find('|', pos);
    std::string c = text.substr(pos, bar == std::string::npos ? bar : bar - pos);
    pos = bar == std::string::npos ? text.size() + 1 : bar + 1;
    if (c == "$WGSHAPE") {
      g->wgmma_shape = true;
    } else if (c[0] == '$') {
      const char* set = type_set(c);
      if (!set) throw SimError(Err::kUnknown, "isa.def: unknown set " + c);
      add_choices(set, g);
    } else {
      g->choices.push_back(c);
    }
  }
}

using Table = std::unordered_map<std::string, std::vector<Compiled>>;

const Table& compiled() {
  static const Table table = [] {
    Table t;
    for (const Form& f : isa_table()) {
      Compiled c;
      c.form = &f;
      std::string p = f.pattern;
      size_t pos = p.find(' ');
      std::string op = p.substr(0, pos);
      while (pos != std::string::npos && pos < p.size()) {
        size_t end = p.find(' ', pos + 1);
        std::string g = p.substr(pos + 1, end == std::string::npos ? end : end - pos - 1);
        pos = end;
        Group group;
        group.optional = g[0] == '[';
        add_choices(g[0] == '[' || g[0] == '(' ? g.substr(1, g.size() - 2) : g, &group);
        c.groups.push_back(group);
      }
      t[op].push_back(c);
    }
    return t;
  }();
  return table;
}

bool fits(const Group& g, const std::string& mod) {
  for (auto& c : g.choices) {
    if (c == mod) return true;
  }
  if (g.wgmma_shape) {
    int n = 0, k = 0, used = 0;
    return sscanf(mod.c_str(), "m64n%dk%d%n", &n, &k, &used) == 2 &&
           used == static_cast<int>(mod.size());
  }
  return false;
}

bool match_groups(const Compiled& c, const std::vector<std::string>& mods, size_t g, size_t m,
                  std::vector<std::string>* out, size_t* furthest) {
  *furthest = std::max(*furthest, m);
  if (g == c.groups.size()) return m == mods.size();
  if (m < mods.size() && fits(c.groups[g], mods[m])) {
    (*out)[g] = mods[m];
    if (match_groups(c, mods, g + 1, m + 1, out, furthest)) return true;
    (*out)[g].clear();
  }
  return c.groups[g].optional && match_groups(c, mods, g + 1, m, out, furthest);
}

}  // namespace

const std::vector<Form>& isa_table() {
  static const std::vector<Form> table = {
#define ISA(fn, pattern, lo, hi, sm, section) {#fn, pattern, low_##fn, lo, hi, sm, section},
#include "isa.def"
#undef ISA
  };
  return table;
}

bool Match::has(const char* mod) const {
  for (auto& g : groups) {
    if (g == mod) return true;
  }
  return false;
}

bool match_isa(const Stmt& stmt, Match* match, std::string* why) {
  auto it = compiled().find(stmt.op);
  if (it == compiled().end()) {
    *why = "unknown instruction '" + stmt.opcode() + "'";
    return false;
  }
  size_t furthest = 0;
  const Form* wrong_count = nullptr;
  for (const Compiled& c : it->second) {
    std::vector<std::string> groups(c.groups.size());
    if (!match_groups(c, stmt.mods, 0, 0, &groups, &furthest)) continue;
    int n = static_cast<int>(stmt.operands.size());
    if (n < c.form->min_operands || n > c.form->max_operands) {
      wrong_count = c.form;
      continue;
    }
    match->form = c.form;
    match->groups = std::move(groups);
    return true;
  }
  if (wrong_count) {
    *why = format("'%s' takes %d to %d operands, found %zu", stmt.opcode().c_str(),
                  wrong_count->min_operands, wrong_count->max_operands, stmt.operands.size());
  } else if (furthest < stmt.mods.size()) {
    *why = "unsupported modifier '." + stmt.mods[furthest] + "' in '" + stmt.opcode() + "'";
  } else {
    *why = "unsupported form '" + stmt.opcode() + "'";
  }
  return false;
}

}  // namespace ptxsim
