# SPDX-License-Identifier: Apache-2.0
"""Backends: each serves append, quantise and attention for one kind of device."""
