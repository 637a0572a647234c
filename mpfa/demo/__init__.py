# SPDX-License-Identifier: Apache-2.0
"""python -m mpfa demo: SmolLM2-135M over every cache format, on the CPU (docs/demo.md)."""
