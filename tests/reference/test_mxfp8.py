# SPDX-License-Identifier: Apache-2.0
"""MXFP8 scale choice at its boundaries, values against brute force, token blocks; FP8 baseline."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from mpfa.reference.fp8 import dequantize_fp8, quantize_fp8
from mpfa.reference.mxfp8 import (
    dequantize_mxfp8,
    dequantize_mxfp8_tokens,
    quantize_mxfp8,
    quantize_mxfp8_tokens,
    scale_byte,
)


def slow_exponent(amax: float) -> int:
    if amax == 0:
        return 0
    e = -127
    while Fraction(amax) > 448 * Fraction(2) ** e:
        e += 1
    return e


def test_scale_byte_at_every_boundary():
    edge = np.array([448 * 2.0**k for k in range(-127, 120)], dtype=np.float32)
    assert np.isfinite(edge).all()
    inf = np.float32(np.inf)
    byte = scale_byte(torch.from_numpy(edge)).tolist()
    assert byte == list(range(0, 247))
    assert scale_byte(torch.from_numpy(np.nextafter(edge, inf))).tolist() == [b + 1 for b in byte]
    assert scale_byte(torch.from_numpy(np.nextafter(edge, -inf))).tolist() == byte


def test_scale_byte_slow_and_special():
    special = [0.0, 1e-45, 1e-40, 2.0**-126, 2.0**-127 * 448, 1.0, 448.0, 449.0, 3.4028234e38]
    g = np.random.default_rng(0)
    bits = g.integers(0, 0x7F800000, 500, dtype=np.uint32)
    amax = np.concatenate([np.array(special, dtype=np.float32), bits.view(np.float32)])
    want = [slow_exponent(float(a)) + 127 for a in amax]
    assert scale_byte(torch.from_numpy(amax)).tolist() == want
    assert want[0] == 127 and max(want) < 255


def test_values_against_brute_force(slow):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, 64, generator=g) * torch.logspace(-30, 30, 12).reshape(6, 2, 1)
    x[0, 0, :32] = 0
    x[1, 0, 5] = -0.0
    x[2, 1, :32] = torch.linspace(-1e-44, 1e-44, 32)
    codes, scale = quantize_mxfp8(x)
    assert codes.dtype == torch.float8_e4m3fn and scale.dtype == torch.float8_e8m0fnu
    assert codes.shape == (6, 2, 64) and scale.shape == (6, 2, 2)
    got = codes.view(torch.uint8).reshape(-1, 32).tolist()
    bytes_ = scale.view(torch.uint8).flatten().tolist()
    for block, row, byte in zip(x.reshape(-1, 32).tolist(), got, bytes_, strict=True):
        e = slow_exponent(max(abs(v) for v in block))
        assert byte == e + 127
        for v, code in zip(block, row, strict=True):
            assert code & 127 == slow.nearest(slow.e4m3, Fraction(v) / Fraction(2) ** e)
            assert bool(code & 128) == bool(np.signbit(np.float32(v)))


def test_nothing_saturates_and_error_is_bounded():
    g = torch.Generator().manual_seed(1)
    top = 448 * 2.0 ** torch.randint(-20, 20, (300, 1), generator=g).float()
    x = (torch.rand(300, 32, generator=g) * 2 - 1) * top
    x[::3, 7] = top[::3, 0]
    x[1::3, 7] = torch.nextafter(top[1::3, 0], torch.tensor(1e9))
    codes, scale = quantize_mxfp8(x)
    y = dequantize_mxfp8(codes, scale)
    half_step = 2.0**-4
    normal = x.abs() >= scale.float() * 2.0**-6
    assert bool(((y - x).abs() <= half_step * x.abs())[normal].all())
    assert torch.equal(y[::3, 7], x[::3, 7])


def test_representable_blocks_are_exact(slow):
    values = torch.tensor([float(v) for v in slow.e4m3])[torch.arange(128) % 127].reshape(4, 32)
    values[:, 0] = 448.0
    x = values * 2.0 ** torch.tensor([[-127.0], [-3.0], [0.0], [100.0]])
    assert torch.equal(dequantize_mxfp8(*quantize_mxfp8(x)), x)


@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 33, 64, 95])
def test_token_blocks_are_transposed_channel_blocks(tokens):
    g = torch.Generator().manual_seed(tokens)
    v = torch.randn(tokens, 2, 16, generator=g) * 10
    codes, scale = quantize_mxfp8_tokens(v)
    blocks = -(-tokens // 32)
    assert codes.shape == v.shape and scale.shape == (blocks, 2, 16)
    padded = torch.zeros(blocks * 32, 2, 16)
    padded[:tokens] = v
    t_codes, t_scale = quantize_mxfp8(padded.movedim(0, -1).contiguous())
    want = t_codes.view(torch.uint8).movedim(-1, 0)[:tokens]
    assert torch.equal(codes.view(torch.uint8), want)
    assert torch.equal(scale.view(torch.uint8), t_scale.view(torch.uint8).movedim(-1, 0))
    y = dequantize_mxfp8_tokens(codes, scale)
    assert y.shape == v.shape
    assert torch.equal(y, dequantize_mxfp8(t_codes, t_scale).movedim(-1, 0)[:tokens])


def test_token_blocks_restart_with_each_sequence():
    g = torch.Generator().manual_seed(5)
    a, b = torch.randn(40, 1, 32, generator=g), torch.randn(50, 1, 32, generator=g) * 1e6
    codes, scale = quantize_mxfp8_tokens(b)
    joint_codes, joint_scale = quantize_mxfp8_tokens(torch.cat([a, b]))
    assert torch.equal(scale.view(torch.uint8), quantize_mxfp8_tokens(b)[1].view(torch.uint8))
    # One joint sequence would put b's first tokens into a's second block.
    assert not torch.equal(joint_codes[40:].view(torch.uint8), codes.view(torch.uint8))
    big_a = dequantize_mxfp8_tokens(joint_codes, joint_scale)[32:40]
    own_a = dequantize_mxfp8_tokens(*quantize_mxfp8_tokens(a))[32:40]
    assert float((big_a - a[32:40]).norm()) > 2 * float((own_a - a[32:40]).norm())


def test_missing_tail_rows_do_not_count():
    v = torch.full((33, 1, 32), 1000.0)
    v[32] = 0.5
    scale = quantize_mxfp8_tokens(v)[1].view(torch.uint8)
    assert scale[0].unique().tolist() == [127 + 2]
    assert scale[1].unique().tolist() == [slow_exponent(0.5) + 127]


def test_bad_arguments():
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize_mxfp8(torch.zeros(2, 48))
    bad = torch.zeros(3, 2, 32)
    bad[2, 1, 4] = float("inf")
    with pytest.raises(ValueError, match=r"k: value inf at index \(2, 1, 4\)"):
        quantize_mxfp8(bad, name="k")
    with pytest.raises(ValueError, match=r"v: value inf at index \(2, 1, 4\)"):
        quantize_mxfp8_tokens(bad)


def test_fp8_scales(slow):
    g = torch.Generator().manual_seed(6)
    x = torch.randn(7, 3, 16, generator=g) * torch.tensor([1.0, 30.0, 1e-3]).reshape(1, 3, 1)
    codes, scale = quantize_fp8(x)
    assert scale.dim() == 0 and float(scale) == float(np.float32(x.abs().max()) / np.float32(448))
    assert torch.equal(
        codes.view(torch.uint8).flatten(),
        torch.tensor(
            [slow.nearest(slow.e4m3, v) + 128 * (v < 0) for v in (x / scale).flatten().tolist()]
        ),
    )
    codes, scale = quantize_fp8(x, dim=(0, 2))
    assert scale.shape == (1, 3, 1)
    for h in range(3):
        one, one_scale = quantize_fp8(x[:, h])
        assert torch.equal(one.view(torch.uint8), codes[:, h].view(torch.uint8))
        assert float(one_scale) == float(scale[0, h, 0])
    y = dequantize_fp8(codes, scale)
    assert float((y - x).norm() / x.norm()) < 0.04


@pytest.mark.parametrize("value", [0.0, 1e-45])
def test_fp8_zero_and_tiny_use_scale_one(value):
    codes, scale = quantize_fp8(torch.full((2, 4), value))
    assert float(scale) == 1.0 and int(codes.view(torch.uint8).max()) == 0
    assert quantize_fp8(torch.zeros(0, 4))[0].shape == (0, 4)


def test_fp8_rejects_non_finite():
    with pytest.raises(ValueError, match=r"v: value nan at index \(0, 1\)"):
        quantize_fp8(torch.tensor([[0.0, float("nan")]]), name="v")
