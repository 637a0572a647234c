// SPDX-License-Identifier: Apache-2.0
#include "lexer.h"

#include <cstdlib>

namespace ptxsim {
namespace {

bool ident_start(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '$' || c == '%';
}
bool digit(char c) { return c >= '0' && c <= '9'; }
bool ident_char(char c) { return ident_start(c) || digit(c); }

}  // namespace

void Lexer::fail(const std::string& text, int line) {
  throw SimError(Err::kInvalidPtx,
                 format("%s:%d: %s", name_.c_str(), line ? line : line_, text.c_str()));
}

void Lexer::skip_space() {
  while (p_ < end_) {
    char c = *p_;
    if (c == '\n') {
      ++line_;
      ++p_;
    } else if (c == ' ' || c == '\t' || c == '\r' || c == '\f' || c == '\v') {
      ++p_;
    } else if (c == '/' && p_ + 1 < end_ && p_[1] == '/') {
      while (p_ < end_ && *p_ != '\n') ++p_;
    } else if (c == '/' && p_ + 1 < end_ && p_[1] == '*') {
      p_ += 2;
      while (p_ + 1 < end_ && !(p_[0] == '*' && p_[1] == '/')) {
        if (*p_ == '\n') ++line_;
        ++p_;
      }
      if (p_ + 1 >= end_) fail("unterminated comment");
      p_ += 2;
    } else {
      break;
    }
  }
}

const Token& Lexer::peek() {
  if (!has_ahead_) {
    skip_space();
    ahead_pos_ = p_;
    ahead_ = lex();
    has_ahead_ = true;
  }
  return ahead_;
}

Token Lexer::next() {
  peek();
  has_ahead_ = false;
  return std::move(ahead_);
}

const char* Lexer::position() {
  peek();
  return ahead_pos_;
}

Token Lexer::lex() {
  Token t;
  t.line = line_;
  if (p_ >= end_) return t;
  char c = *p_;
  if (ident_start(c) || (c == '.' && p_ + 1 < end_ && ident_start(p_[1]))) {
    const char* b = p_++;
    while (p_ < end_ && (ident_char(*p_) || (*p_ == '.' && p_ + 1 < end_ && ident_start(p_[1]))))
      ++p_;
    t.kind = Token::kIdent;
    t.text.assign(b, p_);
    return t;
  }
  if (digit(c)) return lex_number();
  if (c == '"') {
    const char* b = ++p_;
    while (p_ < end_ && *p_ != '"' && *p_ != '\n') p_ += (*p_ == '\\' && p_ + 1 < end_) ? 2 : 1;
    if (p_ >= end_ || *p_ != '"') fail("unterminated string");
    t.kind = Token::kString;
    t.text.assign(b, p_++);
    return t;
  }
  if (static_cast<unsigned char>(c) < 32 || static_cast<unsigned char>(c) > 126) {
    fail(format("unexpected byte 0x%02x", static_cast<unsigned char>(c)));
  }
  t.kind = Token::kPunct;
  t.text.assign(1, c);
  ++p_;
  return t;
}

Token Lexer::lex_number() {
  Token t;
  t.line = line_;
  const char* b = p_;
  auto take_hex = [&](int digits) {
    uint64_t v = 0;
    p_ += 2;
    for (int i = 0; i < digits; ++i, ++p_) {
      if (p_ >= end_ || !isxdigit(static_cast<unsigned char>(*p_))) fail("malformed float literal");
      v = v << 4 | static_cast<uint64_t>(strtol(std::string(1, *p_).c_str(), nullptr, 16));
    }
    return static_cast<int64_t>(v);
  };
  char second = p_ + 1 < end_ ? p_[1] : '\0';
  if (*p_ == '0' && (second == 'f' || second == 'F')) {
    t.kind = Token::kF32;
    t.value = take_hex(8);
    return t;
  }
  if (*p_ == '0' && (second == 'd' || second == 'D')) {
    t.kind = Token::kF64;
    t.value = take_hex(16);
    return t;
  }
  int base = 10;
  if (*p_ == '0' && (second == 'x' || second == 'X')) {
    base = 16;
    p_ += 2;
  } else if (*p_ == '0' && (second == 'b' || second == 'B')) {
    base = 2;
    p_ += 2;
  } else if (*p_ == '0' && digit(second)) {
    base = 8;
    ++p_;
  }
  const char* digits = p_;
  while (p_ < end_ && (base == 16 ? isxdigit(static_cast<unsigned char>(*p_)) != 0 : digit(*p_)))
    ++p_;
  bool is_float = base == 10 && p_ < end_ &&
                  ((*p_ == '.' && p_ + 1 < end_ && digit(p_[1])) || *p_ == 'e' || *p_ == 'E');
  if (is_float) {
    char* stop = nullptr;
    std::string s(b, std::min<size_t>(64, end_ - b));
    double v = strtod(s.c_str(), &stop);
    p_ = b + (stop - s.c_str());
    t.kind = Token::kF64;
    t.value = bit_cast<int64_t>(v);
    return t;
  }
  uint64_t v = 0;
  for (const char* q = digits; q < p_; ++q) {
    int d = *q <= '9' ? *q - '0' : (*q | 32) - 'a' + 10;
    if (d >= base) fail("malformed number");
    v = v * base + d;
  }
  if (p_ < end_ && *p_ == 'U') ++p_;
  if (p_ < end_ && ident_char(*p_) && base != 10) fail("malformed number");
  t.kind = Token::kInt;
  t.value = static_cast<int64_t>(v);
  return t;
}

Token Lexer::next_opcode() {
  if (has_ahead_) {  // re-lex from the start of the token
    p_ = ahead_pos_;
    line_ = ahead_.line;
    has_ahead_ = false;
  }
  skip_space();
  Token t;
  t.line = line_;
  const char* b = p_;
  while (p_ < end_ &&
         (ident_char(*p_) || *p_ == '.' || (*p_ == ':' && p_ + 1 < end_ && p_[1] == ':'))) {
    p_ += *p_ == ':' ? 2 : 1;
  }
  if (p_ == b)
    fail(format("expected an instruction, found '%.20s'",
                std::string(p_, std::min<size_t>(20, end_ - p_)).c_str()));
  t.kind = Token::kIdent;
  t.text.assign(b, p_);
  return t;
}

std::string Lexer::rest_of_line() {
  if (has_ahead_) {
    p_ = ahead_pos_;
    line_ = ahead_.line;
    has_ahead_ = false;
  }
  const char* b = p_;
  while (p_ < end_ && *p_ != '\n') ++p_;
  return std::string(b, p_);
}

bool Lexer::accept(char c) {
  if (!peek().is(c)) return false;
  next();
  return true;
}

bool Lexer::accept(const char* ident) {
  if (!peek().is(ident)) return false;
  next();
  return true;
}

void Lexer::expect(char c) {
  const Token& t = peek();
  if (!t.is(c)) {
    fail(format("expected '%c', found '%s'", c,
                t.kind == Token::kEnd ? "end of file" : t.text.c_str()),
         t.line);
  }
  next();
}

std::string Lexer::expect_ident() {
  const Token& t = peek();
  if (t.kind != Token::kIdent) fail(format("expected a name, found '%s'", t.text.c_str()), t.line);
  return next().text;
}

int64_t Lexer::expect_int() {
  bool minus = accept('-');
  const Token& t = peek();
  if (t.kind != Token::kInt)
    fail(format("expected an integer, found '%s'", t.text.c_str()), t.line);
  int64_t v = next().value;
  return minus ? -v : v;
}

void Lexer::skip_braces() {
  int start = line_;
  int depth = 1;
  if (has_ahead_) {
    p_ = ahead_pos_;
    line_ = ahead_.line;
    has_ahead_ = false;
  }
  while (depth) {
    skip_space();
    if (p_ >= end_) fail("missing '}' of the block that begins here", start);
    if (*p_ == '"') {
      const char* b = ++p_;
      while (p_ < end_ && *p_ != '"' && *p_ != '\n') ++p_;
      if (p_ >= end_ || *p_ != '"')
        fail(format("unterminated string \"%.20s", std::string(b, p_).c_str()));
    } else if (*p_ == '{') {
      ++depth;
    } else if (*p_ == '}') {
      --depth;
    }
    ++p_;
  }
}

}  // namespace ptxsim
