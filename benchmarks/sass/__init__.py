# SPDX-License-Identifier: Apache-2.0
"""Static cycle model of GPU kernels from their machine code (docs/sass_model.md)."""
