# SPDX-License-Identifier: Apache-2.0
"""The builders of these tests on sys.path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
