# SPDX-License-Identifier: Apache-2.0
"""python -m mpfa accuracy: what each cache format keeps of a model's accuracy (docs/accuracy.md)."""
