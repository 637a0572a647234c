// SPDX-License-Identifier: Apache-2.0
// Module scan: directives, declarations, function signatures. Bodies are in ptx_body.cpp.
#include "ptx.h"

#include <algorithm>
#include <mutex>

#include "lexer.h"
#include "ptx_decl.h"

namespace ptxsim {

bool parse_type(const std::string& name, Type* type) {
  static const std::unordered_map<std::string, Type> types = {
      {"pred", {'p', 1, 1}},   {"b8", {'b', 8, 1}},      {"b16", {'b', 16, 1}},
      {"b32", {'b', 32, 1}},   {"b64", {'b', 64, 1}},    {"b128", {'b', 128, 1}},
      {"u8", {'u', 8, 1}},     {"u16", {'u', 16, 1}},    {"u32", {'u', 32, 1}},
      {"u64", {'u', 64, 1}},   {"s8", {'s', 8, 1}},      {"s16", {'s', 16, 1}},
      {"s32", {'s', 32, 1}},   {"s64", {'s', 64, 1}},    {"f16", {'f', 16, 1}},
      {"f32", {'f', 32, 1}},   {"f64", {'f', 64, 1}},    {"bf16", {'h', 16, 1}},
      {"f16x2", {'f', 32, 2}}, {"bf16x2", {'h', 32, 2}}, {"f32x2", {'f', 64, 2}},
      {"u16x2", {'u', 32, 2}}, {"s16x2", {'s', 32, 2}},
  };
  auto it = types.find(name);
  if (it == types.end()) return false;
  *type = it->second;
  return true;
}

std::string Stmt::opcode() const {
  std::string s = op;
  for (auto& m : mods) s += "." + m;
  return s;
}

int Body::find_label(int scope, const std::string& name) const {
  for (; scope >= 0; scope = scopes[scope].parent) {
    auto it = scopes[scope].labels.find(name);
    if (it != scopes[scope].labels.end()) return it->second;
  }
  return -1;
}

int Body::find_variable(int scope, const std::string& name) const {
  for (; scope >= 0; scope = scopes[scope].parent) {
    auto it = scopes[scope].variables.find(name);
    if (it != scopes[scope].variables.end()) return it->second;
  }
  return -1;
}

const std::vector<std::string>* Body::find_targets(int scope, const std::string& name) const {
  for (; scope >= 0; scope = scopes[scope].parent) {
    auto it = scopes[scope].branch_targets.find(name);
    if (it != scopes[scope].branch_targets.end()) return &it->second;
  }
  return nullptr;
}

int Module::arch() const {
  size_t i = target.find("sm_");
  return i == std::string::npos ? 0 : atoi(target.c_str() + i + 3);
}

std::string source_line(const Module& module, int line) {
  const std::string& t = module.text;
  static std::mutex mutex;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (module.line_begin.empty()) {
      module.line_begin.push_back(0);
      for (size_t at = 0; (at = t.find('\n', at)) != std::string::npos;)
        module.line_begin.push_back(++at);
    }
  }
  if (line < 1 || static_cast<size_t>(line) > module.line_begin.size()) return "";
  size_t b = module.line_begin[static_cast<size_t>(line - 1)];
  if (b >= t.size()) return "";
  size_t e = t.find('\n', b);
  std::string s = t.substr(b, std::min<size_t>(e == std::string::npos ? t.size() - b : e - b, 160));
  size_t first = s.find_first_not_of(" \t");
  return first == std::string::npos ? "" : s.substr(first);
}

Variable parse_variable(Lexer& lex, const std::string& space) {
  Variable v;
  v.space = space;
  v.line = lex.line();
  bool have_type = false;
  int vector = 1;
  while (lex.peek().kind == Token::kIdent && lex.peek().text[0] == '.') {
    // Directives lex as one identifier when glued (".global.align"), so split at dots.
    std::string all = lex.next().text;
    size_t pos = 1;
    while (pos <= all.size()) {
      size_t dot = all.find('.', pos);
      std::string d = all.substr(pos, dot == std::string::npos ? std::string::npos : dot - pos);
      pos = dot == std::string::npos ? all.size() + 1 : dot + 1;
      if (d == "align") {
        int64_t a = lex.expect_int();
        if (a < 1 || a > 4096 || (a & (a - 1))) lex.fail("alignment must be a power of two");
        v.align = std::max<uint32_t>(v.align, static_cast<uint32_t>(a));
      } else if (d == "ptr") {
        // .ptr [.space] [.align n] describes the pointee, not the parameter.
        while (lex.peek().kind == Token::kIdent &&
               (lex.peek().is(".global") || lex.peek().is(".shared") || lex.peek().is(".const") ||
                lex.peek().is(".local"))) {
          lex.next();
        }
        if (lex.accept(".align")) lex.expect_int();
      } else if (d == "v2" || d == "v4") {
        vector = d[1] - '0';
      } else if (d == "attribute") {
        lex.expect('(');
        while (!lex.accept(')')) {
          if (lex.next().kind == Token::kEnd) lex.fail("unterminated .attribute");
        }
      } else if (parse_type(d, &v.type)) {
        have_type = true;
      } else {
        lex.fail("unknown directive ." + d + " in a declaration");
      }
    }
  }
  if (!have_type) lex.fail("declaration without a type");
  v.name = lex.expect_ident();
  uint64_t count = vector;
  while (lex.accept('[')) {
    if (lex.accept(']')) {
      count = 0;
      continue;
    }
    int64_t n = lex.expect_int();
    if (n < 0 || n > (1ll << 32)) lex.fail("implausible array size");
    count *= static_cast<uint64_t>(n);
    lex.expect(']');
  }
  uint64_t element = v.type.kind == 'p' ? 1 : v.type.bits / 8;
  v.size = count * element;
  v.align = std::max<uint32_t>(v.align, static_cast<uint32_t>(element));
  return v;
}

namespace {

void parse_init_value(Lexer& lex, Variable* v, uint64_t* offset, uint32_t bytes) {
  if (lex.accept('{')) {
    while (!lex.accept('}')) {
      parse_init_value(lex, v, offset, bytes);
      if (!lex.peek().is('}')) lex.expect(',');
    }
    return;
  }
  auto put = [&](uint64_t value) {
    if (*offset + bytes > v->init.size()) v->init.resize(*offset + bytes);
    std::memcpy(&v->init[*offset], &value, std::min<uint32_t>(bytes, 8));
    *offset += bytes;
  };
  bool minus = lex.accept('-');
  Token t = lex.next();
  if (t.kind == Token::kInt) {
    if (lex.accept('(')) lex.fail("masked symbol initialisers are not supported");
    put(static_cast<uint64_t>(minus ? -t.value : t.value));
  } else if (t.kind == Token::kF32 || t.kind == Token::kF64) {
    uint64_t bits = static_cast<uint64_t>(t.value);
    if (t.kind == Token::kF64 && bytes == 4) {
      bits = bit_cast<uint32_t>(static_cast<float>(bit_cast<double>(t.value)));
    }
    if (minus) bits ^= bytes == 4 ? 1ull << 31 : 1ull << 63;
    put(bits);
  } else if (t.kind == Token::kIdent) {
    Variable::Reloc r{*offset, bytes, t.text, 0, false};
    if (t.text == "generic") {
      lex.expect('(');
      r.symbol = lex.expect_ident();
      r.generic = true;
      lex.expect(')');
    }
    if (lex.accept('+')) r.addend = lex.expect_int();
    put(0);
    v->relocs.push_back(r);
  } else {
    lex.fail("unsupported initialiser '" + t.text + "'", t.line);
  }
}

void skip_to_semicolon(Lexer& lex) {
  while (!lex.accept(';')) {
    if (lex.next().kind == Token::kEnd) lex.fail("unexpected end of file");
  }
}

void parse_signature_params(Lexer& lex, Function* f, std::vector<Variable>* out) {
  lex.expect('(');
  while (!lex.accept(')')) {
    if (lex.accept(".reg")) {
      Type t;
      std::string type = lex.expect_ident();
      if (!parse_type(type.substr(1), &t)) lex.fail("unknown type " + type);
      f->reg_params.push_back({lex.expect_ident(), t});
    } else {
      if (!lex.accept(".param")) lex.fail("expected .param");
      out->push_back(parse_variable(lex, "param"));
    }
    if (!lex.peek().is(')')) lex.expect(',');
  }
}

Function parse_function(Lexer& lex, const char* text_begin, bool entry) {
  Function f;
  f.is_entry = entry;
  f.line = lex.line();
  if (!entry && lex.peek().is('(')) parse_signature_params(lex, &f, &f.returns);
  f.name = lex.expect_ident();
  if (lex.peek().is('(')) parse_signature_params(lex, &f, &f.params);
  auto triple = [&](uint32_t* out) {
    for (int i = 0; i < 3; ++i) out[i] = 1;
    for (int i = 0; i < 3; ++i) {
      out[i] = static_cast<uint32_t>(lex.expect_int());
      if (!lex.accept(',')) break;
    }
  };
  while (lex.peek().kind == Token::kIdent) {
    std::string d = lex.next().text;
    if (d == ".maxntid") {
      triple(f.maxntid);
    } else if (d == ".reqntid") {
      triple(f.reqntid);
    } else if (d == ".reqnctapercluster") {
      triple(f.reqnctapercluster);
    } else if (d == ".explicitcluster") {
      f.explicit_cluster = true;
    } else if (d == ".maxnreg") {
      f.maxnreg = static_cast<int>(lex.expect_int());
    } else if (d == ".minnctapersm") {
      f.minnctapersm = static_cast<int>(lex.expect_int());
    } else if (d == ".maxnctapersm" || d == ".maxclusterrank") {
      lex.expect_int();
    } else if (d == ".pragma") {
      skip_to_semicolon(lex);
    } else if (d == ".noreturn" || d == ".blocksareclusters") {
    } else {
      lex.fail("unknown function directive " + d);
    }
  }
  if (lex.accept(';')) return f;
  f.declared_only = false;
  f.body_line = lex.line();
  if (!lex.peek().is('{')) lex.fail("expected a function body");
  f.body_begin = static_cast<size_t>(lex.position() + 1 - text_begin);
  lex.next();
  lex.skip_braces();
  // skip_braces stops just behind '}'; nothing was looked ahead.
  f.body_end = static_cast<size_t>(lex.raw_position() - 1 - text_begin);
  return f;
}

}  // namespace

std::shared_ptr<Module> parse_module(std::string text, const std::string& name) {
  auto m = std::make_shared<Module>();
  m->name = name;
  m->text = std::move(text);
  const char* begin = m->text.data();
  Lexer lex(begin, begin + m->text.size(), 1, name);
  bool linkage_extern = false;
  while (lex.peek().kind != Token::kEnd) {
    Token t = lex.next();
    if (t.kind != Token::kIdent || t.text[0] != '.')
      lex.fail("expected a directive, found '" + t.text + "'", t.line);
    std::string d = t.text;
    if (d == ".version") {
      Token v = lex.next();
      if (v.kind == Token::kF64) {
        double x = bit_cast<double>(v.value);
        m->version_major = static_cast<int>(x);
        m->version_minor = static_cast<int>((x - m->version_major) * 10 + 0.5);
      } else {
        lex.fail("malformed .version", v.line);
      }
    } else if (d == ".target") {
      m->target = lex.expect_ident();
      while (lex.accept(',')) lex.expect_ident();
    } else if (d == ".address_size") {
      if (lex.expect_int() != 64) lex.fail("only .address_size 64 is supported");
    } else if (d == ".file") {
      int index = static_cast<int>(lex.expect_int());
      Token file = lex.next();
      m->files[index] = file.text;
      lex.rest_of_line();
    } else if (d == ".loc" || d == ".pragma") {
      lex.rest_of_line();
    } else if (d == ".section") {
      while (!lex.accept('{')) {
        if (lex.next().kind == Token::kEnd) lex.fail("malformed .section", t.line);
      }
      lex.skip_braces();
    } else if (d == ".visible" || d == ".weak" || d == ".common") {
    } else if (d == ".extern") {
      linkage_extern = true;
    } else if (d == ".entry" || d == ".func") {
      Function f = parse_function(lex, begin, d == ".entry");
      auto it = m->functions.find(f.name);
      if (it == m->functions.end() || it->second.declared_only) m->functions[f.name] = f;
      linkage_extern = false;
    } else if (d.compare(0, 7, ".global") == 0 || d.compare(0, 6, ".const") == 0 ||
               d.compare(0, 7, ".shared") == 0) {
      size_t dot = d.find('.', 1);
      if (dot != std::string::npos) lex.fail("glued directives " + d + " are not supported");
      Variable v = parse_variable(lex, d.substr(1));
      v.is_extern = linkage_extern;
      linkage_extern = false;
      if (lex.accept('=')) {
        uint64_t offset = 0;
        parse_init_value(lex, &v, &offset, std::max(1, v.type.bits / 8));
        if (v.size == 0) v.size = offset;
        if (offset > v.size) lex.fail("too many initialisers for " + v.name);
      }
      lex.expect(';');
      m->variable_index[v.name] = static_cast<int>(m->variables.size());
      m->variables.push_back(std::move(v));
    } else {
      lex.fail("unknown directive " + d, t.line);
    }
  }
  if (m->version_major == 0)
    throw SimError(Err::kInvalidPtx, name + ":1: no .version directive: not PTX");
  if (m->target.empty()) throw SimError(Err::kInvalidPtx, name + ":1: no .target directive");
  return m;
}

}  // namespace ptxsim
