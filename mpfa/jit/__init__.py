# SPDX-License-Identifier: Apache-2.0
"""Compilation on first use: host modules (any C++ compiler) and, later, CUDA modules."""
