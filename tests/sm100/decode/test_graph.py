# SPDX-License-Identifier: Apache-2.0
"""A captured decode step replayed after further plans: only the metadata changes."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace

import attention_cases
import decode_cases
import pytest
import torch
from decode_cases import Case

import mpfa

tvm_ffi = pytest.importorskip("tvm_ffi")

Q_LEN, MAX_BATCH, PAGE_SIZE = 2, 3, 32
LENGTHS = [(1500, 700, 300), (2, 128, 1025), (1900, 1), (0, 5, 640), (2047,)]


class Graph:
    """The launches made on a stream of the simulator's runtime, as a graph."""

    def __init__(self, simulator, body) -> None:
        self.lib = simulator.lib
        self.stream = ctypes.c_void_p()
        graph, self.exec = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cudaStreamCreate", ctypes.byref(self.stream))
        self.call("cudaStreamBeginCapture", self.stream, 0)
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cpu:0"), self.stream.value):
            body()
        self.call("cudaStreamEndCapture", self.stream, ctypes.byref(graph))
        self.call("cudaGraphInstantiate", ctypes.byref(self.exec), graph, ctypes.c_ulonglong(0))
        self.call("cudaGraphDestroy", graph)

    def call(self, name: str, *args) -> None:
        assert getattr(self.lib, name)(*args) == 0, name

    def replay(self) -> None:
        self.call("cudaGraphLaunch", self.exec, self.stream)
        self.call("cudaStreamSynchronize", self.stream)

    def close(self) -> None:
        self.call("cudaGraphExecDestroy", self.exec)
        self.call("cudaStreamDestroy", self.stream)


def with_lengths(pool: decode_cases.Inputs, lengths: tuple[int, ...], seed: int):
    """Other requests over the filled pages of ``pool``, and the first queries."""
    cache = pool.pages.cache
    filled = pool.pages.indices.long()
    gen = torch.Generator().manual_seed(seed)
    counts = [-(-n // PAGE_SIZE) for n in lengths]
    picks = filled[torch.randint(0, len(filled), (sum(counts),), generator=gen)]
    last = [(n - 1) % PAGE_SIZE + 1 if n else 0 for n in lengths]
    pages = attention_cases.Paged(
        cache, attention_cases.offsets(counts), picks.to(torch.int32), attention_cases.int32(last)
    )
    rows = slice(0, Q_LEN * len(lengths))
    q = pool.query
    query = mpfa.QuantizedQuery(
        q.q[rows], q.q_scale[rows], q.a_comp[rows], q.row_term[rows], q.config, q.stats, q.dtype
    )
    batch = pool.batch.select(range(len(lengths)))
    return replace(
        pool, case=replace(pool.case, kv_lens=lengths), pages=pages, query=query, batch=batch
    )


@pytest.mark.parametrize(("compensation", "channels"), [("mean+channels", 15), ("mean", 0)])
def test_replay_after_replan(compensation, channels, modules, simulator):
    full = (32 * PAGE_SIZE, 20 * PAGE_SIZE, 12 * PAGE_SIZE)  # every page of the pool is full
    case = Case(full, 5, 128, PAGE_SIZE, compensation, channels, Q_LEN, sinks=True, k_bias=2.0)
    pool = decode_cases.build(case)
    limits = {
        "use_cuda_graph": True, "max_batch_size": MAX_BATCH,
        "max_total_qo_len": MAX_BATCH * Q_LEN, "max_num_pages": 128,
    }  # fmt: skip
    first = with_lengths(pool, LENGTHS[0], 0)
    spec, plan = first.plan(**limits)
    launcher = decode_cases.Launcher(modules["128"], modules["combine"], first, spec, plan)
    graph = Graph(simulator, launcher.launch)
    simulator.check()
    assert simulator.launches() == []  # captured, not run
    for seed, lengths in enumerate(LENGTHS):
        inputs = with_lengths(pool, lengths, seed)
        launcher.bind(inputs.plan(**limits)[1])
        launcher.out.fill_(math.nan), launcher.lse.fill_(math.nan)
        graph.replay()
        simulator.check()
        rows = Q_LEN * len(lengths)
        out, lse = launcher.out[:rows], launcher.lse[:rows]
        eager = decode_cases.run(modules["128"], modules["combine"], inputs)
        assert torch.equal(out, eager[0])
        assert torch.equal(lse, eager[1])
        assert decode_cases.faults((out, lse), decode_cases.replay(inputs)) == []
        assert launcher.out[rows:].isnan().all()  # rows of no request are left alone
    graph.close()


def test_launch_sizes_do_not_depend_on_lengths(modules, simulator):
    """What a graph would freeze: grids and shared memory are equal for all lengths of one capacity."""
    case = Case((4 * PAGE_SIZE,) * MAX_BATCH, 4, 128, PAGE_SIZE, "mean", 0, Q_LEN)
    pool = decode_cases.build(case)
    limits = {
        "use_cuda_graph": True, "max_batch_size": MAX_BATCH,
        "max_total_qo_len": MAX_BATCH * Q_LEN, "max_num_pages": 128,
    }  # fmt: skip
    grids = []
    for lengths in ((2, 2, 2), (1500, 1200, 900)):
        inputs = with_lengths(pool, lengths, 1)
        spec, plan = inputs.plan(**limits)
        launcher = decode_cases.Launcher(modules["128"], modules["combine"], inputs, spec, plan)
        simulator.clear()
        launcher.launch()
        grids.append([(x["kernel"], x["grid"], x["block"]) for x in simulator.launches()])
    assert grids[0] == grids[1]
