"""Sizes are read with their units."""

import pytest


@pytest.mark.parametrize(
    ("text", "number"), [("16GiB", 2**34), ("16 GB", 16 * 10**9), ("1.5kib", 1536), ("2048", 2048), (2048.9, 2048)]
)
def test_a_limit_is_read_with_its_unit(text, number):
    from penstock._bytes import parse_bytes

    assert parse_bytes(text) == number
