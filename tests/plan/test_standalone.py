# SPDX-License-Identifier: Apache-2.0
"""The planner headers with nothing but a C++17 compiler: no tvm-ffi, no torch, no CUDA."""

from __future__ import annotations

import subprocess

import pytest

from mpfa.jit import host, paths

FLAGS = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
MAIN = r"""
#include <cstdio>
#include <vector>
#include "mpfa/plan/planner.h"

int main() {
  // Two requests: 5 query tokens over 300 keys, 1 over none. Pages of 16.
  const std::vector<int32_t> qo = {0, 5, 6}, kv = {0, 19, 19}, last = {12, 0};
  std::vector<int32_t> ids(19);
  for (int i = 0; i < 19; ++i) ids[i] = 40 - i;
  mpfa::PlanInput in;
  in.params.page_size = 16;
  in.params.causal = true;
  in.params.partition_tokens = 128;
  in.params.num_sm = 3;
  in.batch_size = 2;
  in.qo_indptr = qo.data();
  in.kv_indptr = kv.data();
  in.kv_indices = ids.data();
  in.last_page_len = last.data();
  in.num_kv_indices = 19;
  mpfa::PlanScratch scratch;
  mpfa::PlanResult counted, planned;
  const auto none = [](int64_t) -> uint8_t* { return nullptr; };
  if (mpfa::make_plan(in, none, &scratch, &counted)) return 1;
  std::vector<uint64_t> memory(counted.layout.int_bytes / 8);
  const auto block = [&](int64_t) { return reinterpret_cast<uint8_t*>(memory.data()); };
  if (mpfa::make_plan(in, block, &scratch, &planned)) return 2;
  if (counted.layout.total_bytes != planned.layout.total_bytes) return 3;
  const auto* items = reinterpret_cast<const mpfa::WorkItem*>(
      block(0) + planned.layout.offset[mpfa::kItems]);
  for (int i = 0; i < planned.num_items; ++i) {
    const mpfa::WorkItem& w = items[i];
    std::printf("%d %d %d %d %d %d %d %d\n", w.request, w.q_begin, w.q_len, w.head_group,
                w.kv_begin, w.kv_end, w.partial_row, w.partial_stride);
  }
  ids[7] = -3;
  const mpfa::PlanError error = mpfa::make_plan(in, none, &scratch, &planned);
  std::printf("%s\n", mpfa::describe(error).c_str());
  return 0;
}
"""


def compiler() -> list[str]:
    try:
        return host.find_compiler()
    except host.CompilerNotFoundError as error:
        pytest.skip(str(error))


def test_planner_with_a_bare_compiler(tmp_path):
    source, program = tmp_path / "main.cpp", tmp_path / "main"
    source.write_text(MAIN)
    include = f"-I{paths.source_root() / 'include'}"
    command = [*compiler(), *FLAGS, include, str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split("\n")
    # Costs 3, 3, 3 (128, 128 and 44 keys) and 2 (no key) on three workers.
    assert lines[:4] == [
        "0 0 5 0 0 128 0 3",
        "1 0 1 0 0 0 -1 0",
        "0 0 5 0 128 256 1 3",
        "0 0 5 0 256 300 2 3",
    ]
    assert lines[4] == "paged_kv_indices[7] = -3 (request 0): page ids must be 0 or more"


def test_every_header_compiles_alone(tmp_path):
    include = paths.source_root() / "include"
    headers = sorted(p for d in ("base", "plan") for p in (include / "mpfa" / d).glob("*.h"))
    assert len(headers) >= 8
    for header in headers:
        command = [*compiler(), *FLAGS, f"-I{include}", "-fsyntax-only", "-include", str(header)]
        subprocess.run([*command, "-x", "c++", "/dev/null"], check=True)
