// SPDX-License-Identifier: Apache-2.0
#ifndef PTXSIM_LEXER_H_
#define PTXSIM_LEXER_H_

#include <cstdint>
#include <string>

#include "base.h"

namespace ptxsim {

struct Token {
  enum Kind : uint8_t { kEnd, kIdent, kInt, kF32, kF64, kString, kPunct };
  Kind kind = kEnd;
  std::string text;   // identifier (directives keep their dot), string contents, or one punctuation
                      // character
  int64_t value = 0;  // kInt; bits of kF32 / kF64
  int line = 0;
  bool is(char c) const { return kind == kPunct && text[0] == c; }
  bool is(const char* s) const { return kind == kIdent && text == s; }
};

// A cursor over PTX text with one token of look-ahead. Identifiers contain letters, digits, _ $ %
// and inner dots; opcodes are read whole ("cp.async.bulk.shared::cluster.global") by next_opcode().
class Lexer {
 public:
  Lexer(const char* begin, const char* end, int line, const std::string& name)
      : p_(begin), end_(end), line_(line), name_(name) {}
  const Token& peek();
  Token next();
  Token next_opcode();  // identifier characters, '.' and "::"
  std::string rest_of_line();
  bool accept(char c);
  bool accept(const char* ident);
  void expect(char c);
  std::string expect_ident();
  int64_t expect_int();
  void skip_braces();                              // from just behind '{' to just behind its '}'
  const char* position();                          // first character of the next token
  const char* raw_position() const { return p_; }  // valid when nothing is looked ahead
  int line() { return peek().line; }
  [[noreturn]] void fail(const std::string& text, int line = 0);

 private:
  void skip_space();
  Token lex();
  Token lex_number();
  const char* p_;
  const char* end_;
  int line_;
  std::string name_;
  Token ahead_;
  bool has_ahead_ = false;
  const char* ahead_pos_ = nullptr;
};

}  // namespace ptxsim

#endif  // PTXSIM_LEXER_H_
