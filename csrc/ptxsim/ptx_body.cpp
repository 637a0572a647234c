// SPDX-License-Identifier: Apache-2.0
// Function bodies: scopes, registers, labels, statements.
#include <algorithm>

#include "lexer.h"
#include "ptx.h"
#include "ptx_decl.h"

namespace ptxsim {
namespace {

class BodyParser {
 public:
  BodyParser(const Module& m, const Function& f)
      : lex_(m.text.data() + f.body_begin, m.text.data() + f.body_end, f.body_line, m.name) {
    body_.scopes.emplace_back();
  }

  Body run() {
    while (lex_.peek().kind != Token::kEnd) item();
    if (scope_ != 0) lex_.fail("missing '}'");
    return std::move(body_);
  }

 private:
  LexScope& scope() { return body_.scopes[scope_]; }

  void item() {
    const Token& t = lex_.peek();
    if (t.is('{')) {
      lex_.next();
      LexScope s;
      s.parent = scope_;
      scope_ = static_cast<int>(body_.scopes.size());
      body_.scopes.push_back(std::move(s));
    } else if (t.is('}')) {
      lex_.next();
      if (scope_ == 0) lex_.fail("unbalanced '}'");
      scope_ = scope().parent;
    } else if (t.is(';')) {
      lex_.next();
    } else if (t.is('@')) {
      statement();
    } else if (t.kind == Token::kIdent && t.text[0] == '.') {
      directive();
    } else if (t.kind == Token::kIdent) {
      statement();
    } else {
      lex_.fail("unexpected '" + t.text + "'", t.line);
    }
  }

  void directive() {
    Token t = lex_.next();
    const std::string& d = t.text;
    if (d == ".loc") {
      loc();
    } else if (d == ".pragma") {
      while (!lex_.accept(';')) {
        if (lex_.next().kind == Token::kEnd) lex_.fail("malformed .pragma", t.line);
      }
    } else if (d == ".file") {
      lex_.rest_of_line();
    } else if (d.compare(0, 4, ".reg") == 0) {
      registers(d.size() > 4 ? d.substr(4) : "");
    } else if (d == ".local" || d == ".shared" || d == ".param" || d == ".global" ||
               d == ".const") {
      do {
        Variable v = parse_variable(lex_, d.substr(1));
        scope().variables[v.name] = static_cast<int>(body_.variables.size());
        body_.variables.push_back(std::move(v));
      } while (lex_.accept(','));
      lex_.expect(';');
    } else {
      lex_.fail("unknown directive " + d, t.line);
    }
  }

  void loc() {
    Loc l;
    l.file = static_cast<int>(lex_.expect_int());
    l.line = static_cast<int>(lex_.expect_int());
    std::string rest = lex_.rest_of_line();
    size_t at = rest.find("inlined_at");
    if (at != std::string::npos)
      sscanf(rest.c_str() + at, "inlined_at %d %d", &l.at_file, &l.at_line);
    loc_ = static_cast<int>(body_.locs.size());
    body_.locs.push_back(l);
  }

  void registers(std::string type) {
    if (type.empty()) type = lex_.expect_ident();
    Type t;
    if (!parse_type(type.substr(1), &t)) lex_.fail("unknown register type " + type);
    do {
      std::string name = lex_.expect_ident();
      if (lex_.accept('<')) {
        int64_t n = lex_.expect_int();
        lex_.expect('>');
        if (n < 0 || n > 4000000) lex_.fail("implausible register count");
        int first = static_cast<int>(body_.regs.size());
        scope().ranges[name] = {first, static_cast<int>(n)};
        for (int64_t i = 0; i < n; ++i) body_.regs.push_back({std::string(), t});
        for (int64_t i = 0; i < n; ++i) body_.regs[first + i].name = name + std::to_string(i);
      } else {
        scope().regs[name] = static_cast<int>(body_.regs.size());
        body_.regs.push_back({name, t});
      }
    } while (lex_.accept(','));
    lex_.expect(';');
  }

  int find_reg(const std::string& name) {
    size_t digits = name.size();
    while (digits > 0 && name[digits - 1] >= '0' && name[digits - 1] <= '9') --digits;
    std::string stem;
    int number = -1;
    if (digits < name.size() && name.size() - digits < 9 &&
        !(name[digits] == '0' && name.size() - digits > 1)) {
      stem = name.substr(0, digits);
      number = atoi(name.c_str() + digits);
    }
    for (int s = scope_; s >= 0; s = body_.scopes[s].parent) {
      LexScope& sc = body_.scopes[s];
      auto it = sc.regs.find(name);
      if (it != sc.regs.end()) return it->second;
      if (number >= 0) {
        auto range = sc.ranges.find(stem);
        if (range != sc.ranges.end() && number < range->second.count)
          return range->second.first + number;
      }
    }
    return -1;
  }

  void statement() {
    Stmt s;
    if (lex_.accept('@')) {
      s.guard_not = lex_.accept('!');
      std::string g = lex_.expect_ident();
      s.guard = find_reg(g);
      if (s.guard < 0 || body_.regs[s.guard].type.kind != 'p')
        lex_.fail("guard '" + g + "' is not a predicate");
    }
    Token op = lex_.next_opcode();
    if (s.guard < 0 && lex_.peek().is(':')) {
      lex_.next();
      label(op);
      return;
    }
    s.line = op.line;
    s.loc = loc_;
    s.scope = scope_;
    size_t pos = op.text.find('.');
    s.op = op.text.substr(0, pos);
    while (pos != std::string::npos) {
      size_t dot = op.text.find('.', pos + 1);
      s.mods.push_back(op.text.substr(pos + 1, dot == std::string::npos ? dot : dot - pos - 1));
      pos = dot;
    }
    if (!lex_.peek().is(';')) {
      do {
        s.operands.push_back(operand());
      } while (lex_.accept(','));
    }
    lex_.expect(';');
    body_.stmts.push_back(std::move(s));
  }

  void label(const Token& name) {
    if (lex_.peek().is(".branchtargets")) {
      lex_.next();
      std::vector<std::string> targets;
      do {
        targets.push_back(lex_.expect_ident());
      } while (lex_.accept(','));
      lex_.expect(';');
      scope().branch_targets[name.text] = targets;
      return;
    }
    if (lex_.peek().is(".callprototype"))
      lex_.fail("indirect calls (.callprototype) are not supported", name.line);
    if (!scope().labels.emplace(name.text, static_cast<int>(body_.stmts.size())).second) {
      lex_.fail("label '" + name.text + "' is defined twice in one scope", name.line);
    }
  }

  Operand operand() {
    Operand a = simple();
    if (lex_.accept('|')) {
      Operand pair;
      pair.kind = Operand::kPair;
      pair.elems.push_back(std::move(a));
      pair.elems.push_back(simple());
      return pair;
    }
    return a;
  }

  Operand list(Operand::Kind kind, char close) {
    Operand o;
    o.kind = kind;
    while (!lex_.accept(close)) {
      o.elems.push_back(operand());
      if (!lex_.peek().is(close)) lex_.expect(',');
    }
    return o;
  }

  Operand simple() {
    Operand o;
    if (lex_.accept('{')) return list(Operand::kVec, '}');
    if (lex_.accept('(')) return list(Operand::kParen, ')');
    if (lex_.accept('[')) {
      o.kind = Operand::kAddr;
      Operand base = simple();
      if (base.kind == Operand::kName) {
        o.imm = base.imm;
        base.imm = 0;
      }
      o.elems.push_back(base);
      if (lex_.peek().is('+') || lex_.peek().is('-')) {
        bool minus = lex_.next().is('-');
        int64_t v = lex_.expect_int();
        o.imm += minus ? -v : v;
      }
      while (lex_.accept(',')) o.elems.push_back(simple());
      lex_.expect(']');
      return o;
    }
    if (lex_.accept('!')) {
      o = simple();
      o.negated = true;
      return o;
    }
    if (lex_.accept('-')) {
      o = simple();
      if (o.kind == Operand::kInt) {
        o.imm = -o.imm;
      } else if (o.kind == Operand::kF32) {
        o.imm ^= 0x80000000ll;
      } else if (o.kind == Operand::kF64) {
        o.imm ^= static_cast<int64_t>(1ull << 63);
      } else {
        lex_.fail("'-' before a non-literal operand");
      }
      return o;
    }
    Token t = lex_.next();
    switch (t.kind) {
      case Token::kInt:
        o.kind = Operand::kInt;
        o.imm = t.value;
        return o;
      case Token::kF32:
      case Token::kF64:
        o.kind = t.kind == Token::kF32 ? Operand::kF32 : Operand::kF64;
        o.imm = t.value;
        return o;
      case Token::kIdent:
        if (t.text == "_") {
          o.kind = Operand::kSink;
          return o;
        }
        o.reg = find_reg(t.text);
        if (o.reg >= 0) {
          o.kind = Operand::kReg;
          return o;
        }
        o.kind = Operand::kName;
        o.name = t.text;
        if (lex_.peek().is('+')) {
          lex_.next();
          o.imm = lex_.expect_int();
        }
        return o;
      default:
        lex_.fail(t.kind == Token::kEnd ? "unexpected end of the function"
                                        : "unexpected '" + t.text + "'",
                  t.line);
    }
  }

  Lexer lex_;
  Body body_;
  int scope_ = 0;
  int loc_ = -1;
};

}  // namespace

Body parse_body(const Module& module, const Function& function) {
  return BodyParser(module, function).run();
}

}  // namespace ptxsim
