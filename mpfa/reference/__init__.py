# SPDX-License-Identifier: Apache-2.0
"""Reference numerics in torch: formats, compensation, cache writes and exact attention.

Everything is vectorised, runs on any device and defines the bits that the CUDA kernels must
produce. ``exact_attention`` is the float64 truth that the formats are measured against.
"""

from mpfa.reference.cache_write import (
    dequantize_ragged_mxfp8,
    dequantize_ragged_qk4pv8,
    gather_bf16,
    gather_mxfp8,
    gather_qk4pv8,
    write_bf16,
    write_mxfp8,
    write_qk4pv8,
)
from mpfa.reference.codecs import (
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    e8m0_decode,
    pack_e2m1,
    require_finite,
    unpack_e2m1,
)
from mpfa.reference.dequant import dequant_query
from mpfa.reference.exact import exact_attention
from mpfa.reference.fp8 import dequantize_fp8, quantize_fp8
from mpfa.reference.layout import pack_scale_atoms, scale_atom_offset, unpack_scale_atoms
from mpfa.reference.mxfp8 import (
    dequantize_mxfp8,
    dequantize_mxfp8_tokens,
    quantize_mxfp8,
    quantize_mxfp8_tokens,
)
from mpfa.reference.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from mpfa.reference.smoothing import (
    delta_scores,
    dot_fp32,
    prepare_key,
    prepare_query,
    split_channels,
)

__all__ = [
    "delta_scores",
    "dequant_query",
    "dequantize_fp8",
    "dequantize_mxfp8",
    "dequantize_mxfp8_tokens",
    "dequantize_nvfp4",
    "dequantize_ragged_mxfp8",
    "dequantize_ragged_qk4pv8",
    "dot_fp32",
    "e2m1_decode",
    "e2m1_encode",
    "e4m3_decode",
    "e4m3_encode",
    "e8m0_decode",
    "exact_attention",
    "gather_bf16",
    "gather_mxfp8",
    "gather_qk4pv8",
    "pack_e2m1",
    "pack_scale_atoms",
    "prepare_key",
    "prepare_query",
    "quantize_fp8",
    "quantize_mxfp8",
    "quantize_mxfp8_tokens",
    "quantize_nvfp4",
    "require_finite",
    "scale_atom_offset",
    "split_channels",
    "unpack_e2m1",
    "unpack_scale_atoms",
    "write_bf16",
    "write_mxfp8",
    "write_qk4pv8",
]
