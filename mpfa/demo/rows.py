# SPDX-License-Identifier: Apache-2.0
"""The rows of the demo's table, under its own short names."""

from __future__ import annotations

from mpfa.accuracy.rows import RowSpec

CHANNELS = 16
# One of the 16 slots of a BF16 MMA step carries Delta when K is centred.
CENTRED_CHANNELS = 15


REFERENCE_KEY = "bf16"
BASELINE_KEY = "fp8"
DIRECT_KEY = "qk4pv8"
MEAN_KEY = "qk4pv8-mean"
CHANNELS_KEY = "qk4pv8-channels"
MEAN_CHANNELS_KEY = "qk4pv8-mean-channels"

ROWS = (
    RowSpec(REFERENCE_KEY, "bf16"),
    RowSpec(BASELINE_KEY, "fp8", note="per-tensor e4m3, a baseline and not a cache format of mpfa"),
    RowSpec(DIRECT_KEY, "qk4pv8"),
    RowSpec(MEAN_KEY, "qk4pv8", "mean", stats="static"),
    RowSpec(CHANNELS_KEY, "qk4pv8", "channels", CHANNELS, four_over_six=True, stats="static"),
    RowSpec(
        MEAN_CHANNELS_KEY,
        "qk4pv8",
        "mean+channels",
        CENTRED_CHANNELS,
        four_over_six=True,
        stats="static",
    ),
    RowSpec("mxfp8", "mxfp8"),
    RowSpec(
        "qk4pv8-mean-channels-plain", "qk4pv8", "mean+channels", CENTRED_CHANNELS, stats="static"
    ),
    RowSpec(
        "qk4pv8-mean-request",
        "qk4pv8",
        "mean",
        stats="request",
        note="means of each request's prompt, frozen for decode; a cached prefix cannot be shared",
    ),
)
ROW_KEYS = tuple(row.key for row in ROWS)
# Run only when asked for by name.
OPTIONAL_KEYS = ("qk4pv8-mean-channels-plain", "qk4pv8-mean-request")
DEFAULT_KEYS = tuple(key for key in ROW_KEYS if key not in OPTIONAL_KEYS)


def select_rows(keys: list[str] | tuple[str, ...] | None) -> list[RowSpec]:
    """Rows in table order; bf16 is always among them because KL is measured against it.

    Raises:
        ValueError: a key that no row has.
    """
    keys = DEFAULT_KEYS if keys is None else keys
    for key in keys:
        if key not in ROW_KEYS:
            raise ValueError(f"formats: must be among {', '.join(ROW_KEYS)}, got {key!r}")
    return [row for row in ROWS if row.key in keys or row.key == REFERENCE_KEY]
