# SPDX-License-Identifier: Apache-2.0
"""Every code of every format, and every rounding boundary, against tables built independently."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from mpfa.reference import codecs as c


def boundary_inputs(table: list[Fraction]) -> np.ndarray:
    """All codes and midpoints, the fp32 values on either side, subnormals and huge values."""
    values = [float(v) for v in table]
    values += [float((a + b) / 2) for a, b in zip(table, table[1:], strict=False)]
    values += [float(table[-1] + (table[-1] - table[-2]) / 2), 1e-45, 1e-38, 3e-39, 1e30, 3.4e38]
    x = np.array(values, dtype=np.float32)
    assert [float(v) for v in x[: len(table)]] == values[: len(table)]
    inf = np.float32(np.inf)
    x = np.concatenate([x, np.nextafter(x, inf), np.nextafter(x, -inf)])
    x = x[np.isfinite(x) & (x >= 0)]
    return np.concatenate([x, -x])


@pytest.mark.parametrize(
    ("name", "encode", "sign"), [("e2m1", c.e2m1_encode, 8), ("e4m3", c.e4m3_encode, 128)]
)
def test_encode_every_boundary(slow, name, encode, sign):
    table = getattr(slow, name)
    x = boundary_inputs(table)
    got = encode(torch.from_numpy(x)).view(torch.uint8).tolist()
    want = [slow.nearest(table, v) + (sign if np.signbit(v) else 0) for v in x]
    assert got == want


def test_encode_random_fp32_bit_patterns(slow):
    bits = np.random.default_rng(0).integers(0, 2**32, 20000, dtype=np.uint32)
    x = bits.view(np.float32)
    x = np.concatenate([x[np.isfinite(x)], np.linspace(-8, 8, 5001, dtype=np.float32)])
    t = torch.from_numpy(x)
    sign = np.signbit(x)
    assert c.e2m1_encode(t).tolist() == [
        slow.nearest(slow.e2m1, v) + 8 * bool(s) for v, s in zip(x, sign, strict=True)
    ]
    assert c.e4m3_encode(t).view(torch.uint8).tolist() == [
        slow.nearest(slow.e4m3, v) + 128 * bool(s) for v, s in zip(x, sign, strict=True)
    ]


def test_e2m1_codes_decode_and_round_trip(slow):
    codes = torch.arange(16, dtype=torch.uint8)
    values = c.e2m1_decode(codes)
    want = [float(v) for v in slow.e2m1]
    assert values.tolist() == want + [-v for v in want]
    assert torch.signbit(values).tolist() == [False] * 8 + [True] * 8
    assert torch.equal(c.e2m1_encode(values), codes)


def test_e2m1_matches_torch_float4():
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    try:
        want = packed.view(torch.float4_e2m1fn_x2).to(torch.float32)
    except (AttributeError, NotImplementedError, RuntimeError) as err:
        pytest.skip(f"this torch does not convert float4_e2m1fn_x2: {err}")
    assert torch.equal(c.decode_packed_e2m1(packed[:, None]).flatten(), want.flatten())


def test_e4m3_codes_decode_and_round_trip(slow):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = c.e4m3_decode(codes)
    torch_values = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(values.nan_to_num(1e9), torch_values.nan_to_num(1e9))
    assert values.isnan().nonzero().flatten().tolist() == [127, 255]
    finite = ~values.isnan()
    want = [float(v) for v in slow.e4m3]
    assert values[finite].tolist() == want + [-v for v in want]
    assert torch.equal(c.e4m3_encode(values[finite]).view(torch.uint8), codes[finite])
    assert torch.equal(c.e4m3_decode(codes.view(torch.float8_e4m3fn))[finite], values[finite])


def test_e8m0_codes_match_torch():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = c.e8m0_decode(codes)
    assert values[:255].tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert values[255].isnan()
    assert torch.equal(values[:255], codes.view(torch.float8_e8m0fnu).float()[:255])
    assert torch.equal(c.e8m0_decode(codes.view(torch.float8_e8m0fnu))[:255], values[:255])


def test_pack_order_and_inverse():
    assert c.pack_e2m1(torch.tensor([1, 2, 15, 0], dtype=torch.uint8)).tolist() == [0x21, 0x0F]
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8).reshape(2, 8, 16)
    codes = c.unpack_e2m1(packed)
    assert codes.shape == (2, 8, 32)
    assert torch.equal(c.pack_e2m1(codes), packed)
    assert torch.equal(c.decode_packed_e2m1(packed), c.e2m1_decode(codes))
    with pytest.raises(ValueError, match="codes"):
        c.pack_e2m1(torch.zeros(3, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_are_widened_first(dtype):
    x = torch.linspace(-500, 500, 4001).to(dtype)
    assert torch.equal(c.e2m1_encode(x), c.e2m1_encode(x.float()))
    a, b = c.e4m3_encode(x), c.e4m3_encode(x.float())
    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("encode", [c.e2m1_encode, c.e4m3_encode])
def test_encode_rejects_non_finite(encode, bad):
    x = torch.zeros(3, 5)
    x[1, 2] = bad
    with pytest.raises(ValueError, match=r"x: value .* at index \(1, 2\)"):
        encode(x)


def test_encode_rejects_other_dtypes():
    with pytest.raises(ValueError, match="x: dtype"):
        c.e2m1_encode(torch.zeros(4, dtype=torch.float64))


def test_require_finite_names_the_first_index_and_honours_valid():
    t = torch.zeros(4, 2, 3)
    t[1, 1, 2] = float("nan")
    t[3, 0, 1] = float("inf")
    with pytest.raises(ValueError, match=r"key: value nan at index \(1, 1, 2\)"):
        c.require_finite("key", t)
    valid = torch.tensor([True, False, True, True])
    with pytest.raises(ValueError, match=r"key: value inf at index \(3, 0, 1\)"):
        c.require_finite("key", t, valid)
    c.require_finite("key", t, torch.tensor([True, False, True, False]))
    c.require_finite("key", torch.zeros(0, 2))


@pytest.mark.parametrize("spread", [0, 3, 30, 70])
def test_fma_rounds_once(slow, spread):
    """Sums near fp32 ties, where rounding to fp64 first would go the wrong way, and any others."""
    g = np.random.default_rng(spread)
    exponents = g.integers(-spread, spread + 1, (3, 4000))
    a, b, third = (g.standard_normal((3, 4000)) * 2.0**exponents).astype(np.float32)
    # Half: a*b is half an ulp of `third` away from a neighbour, give or take a*b's own last bits.
    with np.errstate(over="ignore"):
        near = (np.float64(a) * np.float64(b) * 2.0**24).astype(np.float32)
    third = np.where((np.arange(4000) % 2 == 0) & np.isfinite(near), near, third)
    got = c.fma_fp32(*(torch.from_numpy(x) for x in (a, b, third)))
    want = [slow.fma(*values) for values in zip(a, b, third, strict=True)]
    assert got.tolist() == [float(x) for x in want]


def test_fma_does_not_round_twice():
    # a*b = 2^-24 - 2^-70: just below half an ulp of 1 + 2^-23. fp64 rounds the sum to the tie, which
    # would go to the even neighbour.
    a = torch.tensor([(1 + 2.0**-23) * 2.0**-12, 2.0**-40, 0.0, 3e38, -3e38])
    b = torch.tensor([(1 - 2.0**-23) * 2.0**-12, 2.0**-40, 5.0, 3e38, 3e38])
    third = torch.tensor([1 + 2.0**-23, 1.0, -0.0, 1.0, torch.inf])
    got = c.fma_fp32(a, b, third).tolist()
    assert got == [1 + 2.0**-23, 1.0, 0.0, torch.inf, torch.inf]
    assert float((a.double() * b.double() + third.double()).float()[0]) == 1 + 2.0**-22
