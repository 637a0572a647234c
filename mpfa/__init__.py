# SPDX-License-Identifier: Apache-2.0
"""mpfa: attention kernels that read a low-bit KV cache, behind plan()/run() wrappers."""

from mpfa.append import append_paged_kv_cache
from mpfa.cache import PagedKVCache
from mpfa.calibrate import calibrate, load_stats, save_stats
from mpfa.config import KVCacheConfig
from mpfa.decode import BatchDecodeWrapper
from mpfa.errors import GPUArchitectureError
from mpfa.merge import merge_states
from mpfa.prefill import BatchPrefillWrapper, single_prefill
from mpfa.quantize import quantize_kv, quantize_query
from mpfa.quantized import QuantizedKV, QuantizedQuery
from mpfa.stats import SmoothingStats
from mpfa.support import supports
from mpfa.workspace import workspace_size

__version__ = "0.1.0"

__all__ = [
    "BatchDecodeWrapper",
    "BatchPrefillWrapper",
    "GPUArchitectureError",
    "KVCacheConfig",
    "PagedKVCache",
    "QuantizedKV",
    "QuantizedQuery",
    "SmoothingStats",
    "append_paged_kv_cache",
    "calibrate",
    "load_stats",
    "merge_states",
    "quantize_kv",
    "quantize_query",
    "save_stats",
    "single_prefill",
    "supports",
    "workspace_size",
]
