# SPDX-License-Identifier: Apache-2.0
"""The kernels' block functions, compiled for the host, against mpfa.reference, bit for bit.

The device code differs from what runs here in the conversion instructions only.
"""

import pytest
import torch

from mpfa import reference as ref
from mpfa.jit import host

MODULE = host.HostSpec("mpfa_quant_host", ("quant_host.cpp",), ("base", "ptx", "quant"), 6)
E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@pytest.fixture(scope="module")
def blocks():
    return host.load(MODULE)


def all_16_bit(dtype: torch.dtype) -> torch.Tensor:
    """Every finite value of a 16-bit float type, as fp32."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    return values[torch.isfinite(values)]


def positive_e4m3() -> torch.Tensor:
    return ref.e4m3_decode(torch.arange(1, 127, dtype=torch.uint8))


def nvfp4(blocks, x: torch.Tensor, four_over_six: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.contiguous()
    codes = torch.empty((x.shape[0], 8), dtype=torch.uint8)
    scale = torch.empty(x.shape[0], dtype=torch.uint8)
    blocks.nvfp4(x, four_over_six, codes, scale)
    return codes, scale


def check_nvfp4(blocks, x: torch.Tensor, four_over_six: bool) -> None:
    codes, scale = nvfp4(blocks, x, four_over_six)
    want_codes, want_scale = ref.quantize_nvfp4(x, four_over_six=four_over_six)
    bad = ((codes != want_codes).any(dim=1) | (scale != want_scale[:, 0])).nonzero()
    assert len(bad) == 0, (
        f"{len(bad)} of {len(x)} blocks differ, first {x[bad[0, 0]].tolist()}: "
        f"{codes[bad[0, 0]].tolist()} scale {int(scale[bad[0, 0]])}, reference "
        f"{want_codes[bad[0, 0]].tolist()} scale {int(want_scale[bad[0, 0], 0])}"
    )


def neighbours(x: torch.Tensor) -> torch.Tensor:
    inf = torch.tensor(torch.inf)
    return torch.stack([torch.nextafter(x, -inf), x, torch.nextafter(x, inf)], dim=-1)


@pytest.mark.parametrize("four_over_six", [False, True])
def test_nvfp4_every_boundary_of_every_scale(blocks, four_over_six):
    """A block whose maximum fixes the scale, filled with the rounding boundaries and both fp32
    neighbours of each: 126 scales, both signs."""
    scale = positive_e4m3()
    ties = neighbours(scale[:, None] * torch.tensor(E2M1_TIES)).flatten(1)  # [126, 21]
    anchor = (6.0 * scale)[:, None]
    first = torch.cat([anchor, ties[:, :15]], dim=1)
    rest = torch.cat([anchor, ties[:, 6:]], dim=1)
    x = torch.cat([first, rest, -first, -rest])
    check_nvfp4(blocks, x, four_over_six)
    check_nvfp4(blocks, x * (4.0 / 6.0), four_over_six)


@pytest.mark.parametrize("four_over_six", [False, True])
def test_nvfp4_maximum_at_every_boundary_of_the_scale(blocks, four_over_six):
    """amax/6 and amax/4 on, just below and just above every e4m3 boundary, saturation included."""
    scale = torch.cat([torch.zeros(1), positive_e4m3(), torch.tensor([464.0, 480.0])])
    middle = (scale[1:] + scale[:-1]) / 2
    for factor in (6.0, 4.0):
        amax = torch.cat([neighbours(middle * factor), neighbours(scale[1:] * factor)]).flatten()
        x = torch.rand(len(amax), 16) * amax[:, None]
        x[torch.arange(len(amax)), torch.randint(16, (len(amax),))] = amax
        check_nvfp4(blocks, x * torch.where(torch.rand(x.shape) < 0.5, -1.0, 1.0), four_over_six)


@pytest.mark.parametrize("four_over_six", [False, True])
def test_nvfp4_every_16_bit_value(blocks, four_over_six):
    for dtype in (torch.bfloat16, torch.float16):
        values = all_16_bit(dtype)
        values = values[torch.randperm(len(values))][: len(values) // 16 * 16].view(-1, 16)
        check_nvfp4(blocks, values, four_over_six)
        order = values.flatten().abs().sort().values.view(-1, 16)  # blocks of similar magnitude
        check_nvfp4(blocks, order * torch.where(torch.rand(order.shape) < 0.5, -1.0, 1.0), False)
        check_nvfp4(blocks, order, four_over_six)


@pytest.mark.parametrize("four_over_six", [False, True])
def test_nvfp4_random_centred_and_extreme(blocks, four_over_six):
    n = 1 << 15
    x = torch.randn(n, 16) * torch.exp2(torch.randint(-24, 24, (n, 1)).float())
    x[::3] = x[::3].bfloat16().float() - torch.randn(16)
    x[::7, torch.randint(16, (5,))] *= 50.0
    x[::11] = 0.0
    x[::13] = -0.0
    x[5::17] *= 1e-38
    x[6::17] = torch.finfo(torch.float32).max * torch.sign(x[6::17])
    x[7::19] = torch.randint(-12, 13, x[7::19].shape) / 2.0
    check_nvfp4(blocks, x, four_over_six)


def test_e4m3(blocks):
    table = positive_e4m3()
    middle = neighbours((table[1:] + table[:-1]) / 2).flatten()
    extra = torch.tensor([0.0, 448.0, 463.9, 464.0, 465.0, 1e30, 2.0**-10, 2.0**-11, 1e-40])
    x = torch.cat([all_16_bit(torch.bfloat16), all_16_bit(torch.float16), table, middle, extra])
    x = torch.cat([x, -x, torch.randn(1 << 16) * 100])
    codes = torch.empty(len(x), dtype=torch.uint8)
    blocks.e4m3(x, codes)
    assert torch.equal(codes, ref.e4m3_encode(x).view(torch.uint8))


def test_mxfp8(blocks):
    n = 1 << 13
    x = torch.randn(n, 32) * torch.exp2(torch.randint(-140, 120, (n, 1)).float())
    x[::5] = 0.0
    # Maxima at, just below and just above 448 * 2^e.
    edge = neighbours(448.0 * torch.exp2(torch.arange(-130.0, 119.0))).flatten()
    x[1 : 1 + len(edge), 7] = edge
    x[1 : 1 + len(edge)] = torch.clamp(x[1 : 1 + len(edge)], -edge[:, None], edge[:, None])
    x[-1] = torch.finfo(torch.float32).max
    codes = torch.empty((n, 32), dtype=torch.uint8)
    scale = torch.empty(n, dtype=torch.uint8)
    blocks.mxfp8(x, codes, scale)
    want, want_scale = ref.quantize_mxfp8(x)
    assert torch.equal(scale, want_scale.view(torch.uint8)[:, 0])
    assert torch.equal(codes, want.view(torch.uint8))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_dot_order(blocks, dim):
    a, b = torch.randn(500, dim) * 30, torch.randn(500, dim)
    out = torch.empty(500)
    blocks.dot(a, b, out)
    assert torch.equal(out, ref.dot_fp32(a, b))


def test_16_bit_conversions(blocks):
    for dtype in (torch.bfloat16, torch.float16):
        bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
        out = torch.empty((1 << 15, 2))
        blocks.unpack(bits.view(torch.int32), dtype == torch.bfloat16, out)
        want = bits.view(dtype).float()
        finite = torch.isfinite(want)
        assert torch.equal(out.flatten().view(torch.int32)[finite], want.view(torch.int32)[finite])
    x = torch.cat([torch.randn(1 << 16) * 1e3, neighbours(all_16_bit(torch.bfloat16)).flatten()])
    x = x[torch.isfinite(x)]
    bits = torch.empty(len(x), dtype=torch.int16)
    blocks.bf16(x, bits)
    assert torch.equal(bits, x.to(torch.bfloat16).view(torch.int16))
