# SPDX-License-Identifier: Apache-2.0
"""The row grammar: every key means what it says, nothing else is taken."""

from __future__ import annotations

import pytest

from mpfa.accuracy.models import Geometry
from mpfa.accuracy.rows import DEFAULT_KEYS, FULL_KEYS, QUICK_KEYS, RowSpec, parse_row, parse_rows

D128 = Geometry(num_layers=1, num_qo_heads=8, num_kv_heads=2, head_dim=128)


def test_keys_by_hand():
    assert parse_row("bf16") == RowSpec("bf16", "bf16")
    assert parse_row("none+4/6") == RowSpec("none+4/6", "qk4pv8", four_over_six=True)
    row = parse_row("mean+channels15+4/6:request")
    assert (row.compensation, row.channels, row.four_over_six) == ("mean+channels", 15, True)
    assert row.stats == "request" and row.takes_own_means and row.needs_calibration
    assert not parse_row("mean:request").needs_calibration
    first = parse_row("mean:first32")
    assert (first.stats, first.first_tokens, first.takes_own_means) == ("first", 32, True)
    assert parse_row("channels16").stats == "static"
    k_only = parse_row("kmean+channels7")
    assert (k_only.compensation, k_only.centre_q, k_only.channels) == ("mean+channels", False, 7)
    study = parse_row("channels16:centred")
    assert study.centred_choice and study.stats == "static" and study.compensation == "channels"
    eigen = parse_row("mean+eigen15")
    assert eigen.is_eigen and eigen.cache_format is None and eigen.channels == 15


def test_cache_format_is_what_a_cache_takes():
    config = parse_row("mean+channels7+4/6").cache_config(D128)
    assert (config.format, config.compensation, config.channels) == ("qk4pv8", "mean+channels", 7)
    assert config.four_over_six and config.num_qo_heads == 8
    for key in ("fp8", "eigen16"):
        with pytest.raises(ValueError, match="no cache format"):
            parse_row(key).cache_config(D128)


@pytest.mark.parametrize(
    ("key", "stored"),
    [
        ("bf16", 512),
        ("fp8", 256),
        ("mxfp8", 264),
        ("none", 200),
        ("mean", 208),
        ("channels16", 232),
        ("mean+channels15", 238),
        ("mean+eigen15", 238),
        ("eigen16", 232),
    ],
)
def test_bytes_per_token_and_head_at_head_dim_128(key, stored):
    assert parse_row(key).bytes_per_token_head(D128) == stored


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("int4", "formats: must be bf16, fp8, mxfp8, or none, .*got 'int4'"),
        ("", "formats: must be"),
        ("channels17", r"'channels17' must have 1\.\.16 slots, got 17"),
        ("channels0", r"1\.\.16 slots, got 0"),
        ("mean+channels16", r"1\.\.15 slots, got 16"),
        ("mean+eigen16", r"1\.\.15 slots, got 16"),
        ("mean:first0", "means of 1 token or more"),
        ("channels3:request", "'request' is for rows that centre Q and K"),
        ("none:static", "is for rows that centre"),
        ("kmean:request", "is for rows that centre Q and K"),
        ("mean:centred", "':centred' is for channelsC only"),
        ("mean+4/6+4/6", "formats: must be"),
        ("bf16+4/6", "formats: must be"),
    ],
)
def test_other_keys_are_refused(key, message):
    with pytest.raises(ValueError, match=message):
        parse_row(key)


def test_lists_start_with_the_reference_and_hold_each_row_once():
    keys = [row.key for row in parse_rows("mean, none,mean,bf16")]
    assert keys == ["bf16", "mean", "none"]
    for default in (DEFAULT_KEYS, QUICK_KEYS, FULL_KEYS):
        rows = parse_rows(None, default)
        assert [r.key for r in rows] == list(default)
        assert len(set(rows)) == len(default)
    assert set(QUICK_KEYS) <= set(DEFAULT_KEYS) <= set(FULL_KEYS)


def test_full_holds_the_matrix():
    for c in (3, 7, 12, 15):
        for tail in ("", "+4/6"):
            assert f"channels{c}{tail}" in FULL_KEYS and f"mean+channels{c}{tail}" in FULL_KEYS


def test_labels_of_different_rows_differ():
    labels = [parse_row(k).label for k in FULL_KEYS if k not in ("bf16", "fp8", "mxfp8")]
    assert len(set(labels)) == len(labels)
    assert parse_row("mean:first32").label == "mean, first 32"
    assert parse_row("kmean").label == "K mean, static"
