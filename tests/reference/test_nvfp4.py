# SPDX-License-Identifier: Apache-2.0
"""NVFP4 against a slow implementation that shares no code with it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfa.reference.codecs import unpack_e2m1
from mpfa.reference.nvfp4 import _squared_error, dequantize_nvfp4, quantize_nvfp4

F32 = np.float32


def slow_candidate(slow, values, divisor):
    amax = max(abs(v) for v in values)
    scale_code = slow.nearest(slow.e4m3, amax / F32(divisor))
    scale = F32(float(slow.e4m3[scale_code]))
    if scale == 0:
        codes = [0] * 16
    else:
        quotients = [v / scale for v in values]
        codes = [slow.nearest(slow.e2m1, q) + 8 * bool(np.signbit(q)) for q in quotients]
    return codes, scale_code


def slow_error(slow, values, codes, scale_code):
    err = None
    for v, code in zip(values, codes, strict=True):
        x = F32(float(slow.e2m1[code & 7])) * (F32(-1) if code & 8 else F32(1))
        d = v - x * F32(float(slow.e4m3[scale_code]))
        err = d * d if err is None else slow.fma(d, d, err) if np.isfinite(d + err) else d + err
    return err


def slow_block(slow, values, four_over_six):
    values = [F32(v) for v in values]
    with np.errstate(over="ignore"):
        best = slow_candidate(slow, values, 6)
        if four_over_six:
            other = slow_candidate(slow, values, 4)
            if slow_error(slow, values, *other) < slow_error(slow, values, *best):
                best = other
    return best


def check_blocks(slow, x: torch.Tensor, four_over_six: bool):
    packed, scale = quantize_nvfp4(x, four_over_six=four_over_six)
    assert packed.shape == (*x.shape[:-1], x.shape[-1] // 2)
    assert scale.shape == (*x.shape[:-1], x.shape[-1] // 16)
    assert packed.dtype == scale.dtype == torch.uint8
    blocks = x.reshape(-1, 16).numpy()
    codes = unpack_e2m1(packed).reshape(-1, 16).tolist()
    for block, got_codes, got_scale in zip(blocks, codes, scale.flatten().tolist(), strict=True):
        assert (got_codes, got_scale) == slow_block(slow, block, four_over_six)


def adversarial_blocks(slow) -> torch.Tensor:
    inf = float("inf")
    rows = []
    # Scales at and next to every e4m3 midpoint of amax/6 and amax/4.
    for a, b in zip(slow.e4m3[::5], slow.e4m3[1::5], strict=False):
        for divisor in (6, 4):
            amax = F32(float((a + b) / 2 * divisor))
            for top in (amax, np.nextafter(amax, F32(inf)), np.nextafter(amax, F32(0))):
                rows.append([top] + [top * F32(i / 17 - 0.4) for i in range(15)])
    # Values at and next to every e2m1 midpoint under scale 1, and negative zero.
    ties = [F32(t) for t in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)]
    for shift in (
        lambda t: t,
        lambda t: np.nextafter(t, F32(9)),
        lambda t: np.nextafter(t, F32(0)),
    ):
        moved = [shift(t) for t in ties]
        rows.append([F32(6), F32(-0.0), *moved, *[-t for t in moved]])
    # Blocks whose scale rounds to 0 or is the smallest, subnormals, saturation, near the fp32 end.
    for top in (0.0, 1e-45, 1e-38, 2.0**-10 * 6, 2.0**-10 * 6.0001, 2.0**-10 * 5, 2.0**-9 * 6):
        rows.append([F32(top * f) for f in np.linspace(-1, 1, 16)])
    for top in (2600.0, 2688.0, 3000.0, 1e10, 3.4e38):
        rows.append([F32(top * f) for f in np.linspace(-1, 1, 16)])
    rows.append([F32(-0.0)] * 16)
    rows.append([F32(-3.3)] * 16)
    for i in range(16):
        rows.append([F32(700.0) if j == i else F32(0.01 * (j - 8)) for j in range(16)])
    return torch.from_numpy(np.array(rows, dtype=np.float32))


@pytest.mark.parametrize("four_over_six", [False, True])
def test_adversarial_blocks(slow, four_over_six):
    check_blocks(slow, adversarial_blocks(slow), four_over_six)


@pytest.mark.parametrize("four_over_six", [False, True])
@pytest.mark.parametrize("shape", [(5, 3, 64), (4, 128), (2, 1, 2, 16)])
def test_random_and_biased(slow, shape, four_over_six):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=g)
    bias = torch.randn(shape[-1], generator=g) * (torch.rand(shape[-1], generator=g) < 0.2) * 40
    check_blocks(slow, x, four_over_six)
    check_blocks(slow, x + bias, four_over_six)
    check_blocks(slow, x.to(torch.bfloat16).float() * 0.01, four_over_six)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=16, max_size=16),
    st.booleans(),
)
def test_any_block(slow, values, four_over_six):
    check_blocks(slow, torch.tensor([values], dtype=torch.float32), four_over_six)


def test_representable_blocks_are_exact(slow):
    g = torch.Generator().manual_seed(2)
    magnitudes = torch.tensor([float(v) for v in slow.e2m1])
    x = magnitudes[torch.randint(0, 8, (126, 16), generator=g)]
    x *= torch.randint(0, 2, x.shape, generator=g) * 2 - 1
    x[:, 3] = -6.0
    scales = torch.tensor([float(v) for v in slow.e4m3[1:]])
    x = x * scales[:, None]
    for four_over_six in (False, True):
        packed, scale = quantize_nvfp4(x, four_over_six=four_over_six)
        assert scale.flatten().tolist() == list(range(1, 127))
        assert torch.equal(dequantize_nvfp4(packed, scale), x)


def test_four_over_six_is_never_worse():
    g = torch.Generator().manual_seed(3)
    x = torch.randn(4000, 16, generator=g) * torch.rand(4000, 1, generator=g) * 30
    errors = []
    for four_over_six in (False, True):
        y = dequantize_nvfp4(*quantize_nvfp4(x, four_over_six=four_over_six))
        errors.append((x.double() - y.double()).square().sum(-1))
    plain, chosen = errors
    assert bool((chosen <= plain * (1 + 1e-5)).all())
    assert float((chosen < plain).float().mean()) > 0.2


def test_equal_errors_keep_the_scale_of_six():
    # 12 = 6 * 2 = 4 * 3 and 6 = 3 * 2 = 2 * 3: both candidates are exact.
    packed, scale = quantize_nvfp4(torch.tensor([[12.0, -6.0] + [0.0] * 14]), four_over_six=True)
    assert packed.flatten().tolist()[0] == 0xD7
    assert float(scale.view(torch.float8_e4m3fn)) == 2.0


def test_squared_error_is_summed_in_channel_order(slow):
    g = torch.Generator().manual_seed(5)
    x = torch.randn(300, 16, generator=g) * torch.logspace(-2, 2, 16)
    codes = torch.randint(0, 16, (300, 16), generator=g).to(torch.uint8)
    scale = torch.randint(1, 127, (300,), generator=g).to(torch.uint8)
    want = [
        slow_error(slow, list(values), row, code)
        for values, row, code in zip(x.numpy(), codes.tolist(), scale.tolist(), strict=True)
    ]
    assert _squared_error(x, codes, scale).tolist() == np.array(want, dtype=F32).tolist()


def test_zero_scale_writes_no_negative_zero():
    packed, scale = quantize_nvfp4(torch.full((1, 32), -1e-5))
    assert int(packed.max()) == 0 and int(scale.max()) == 0
    packed, scale = quantize_nvfp4(torch.tensor([[6.0] + [-0.0] * 15]))
    assert packed.flatten().tolist() == [0x87] + [0x88] * 7


def test_outer_scale_divides_then_multiplies():
    g = torch.Generator().manual_seed(4)
    x = torch.randn(6, 3, 32, generator=g)
    outer = torch.tensor([0.3, 1.0, 7e-3])
    packed, scale = quantize_nvfp4(x, outer_scale=outer)
    want_packed, want_scale = quantize_nvfp4(x / outer[:, None])
    assert torch.equal(packed, want_packed) and torch.equal(scale, want_scale)
    y = dequantize_nvfp4(packed, scale, outer)
    assert torch.equal(y, dequantize_nvfp4(packed, scale) * outer[:, None])
    # Values far below e4m3's range survive only with the outer scale.
    tiny = x * 1e-6
    amax = tiny.abs().amax(dim=(0, 2))
    packed, scale = quantize_nvfp4(tiny, outer_scale=amax / (6 * 448))
    y = dequantize_nvfp4(packed, scale, amax / (6 * 448))
    assert float((y - tiny).norm() / tiny.norm()) < 0.15
    assert int(quantize_nvfp4(tiny)[0].max()) == 0


def test_empty_input():
    packed, scale = quantize_nvfp4(torch.zeros(0, 2, 64), four_over_six=True)
    assert packed.shape == (0, 2, 32) and scale.shape == (0, 2, 4)
    assert dequantize_nvfp4(packed, scale).shape == (0, 2, 64)


def test_bad_arguments():
    with pytest.raises(ValueError, match="multiple of 16"):
        quantize_nvfp4(torch.zeros(2, 24))
    x = torch.zeros(2, 32)
    with pytest.raises(ValueError, match="outer_scale: minimum is 0.0"):
        quantize_nvfp4(x, outer_scale=torch.tensor([1.0, 0.0]))
    x[1, 7] = float("nan")
    with pytest.raises(ValueError, match=r"k: value nan at index \(1, 7\)"):
        quantize_nvfp4(x, name="k")
    with pytest.raises(ValueError, match="x: dtype"):
        quantize_nvfp4(torch.zeros(2, 32, dtype=torch.int32))
