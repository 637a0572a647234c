# SPDX-License-Identifier: Apache-2.0
"""tiny_models.py of this folder on sys.path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
