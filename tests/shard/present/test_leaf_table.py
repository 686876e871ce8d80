"""Leaves of repeated layers are one group, with their optimizer state."""

import pytest
from tests.shard.plans import BATCH, leaf, megatron, plan, spec

from penstock.shard.present.leaf_table import count_layers, group_layers

REPLICATED, ROWS = spec(None, None), spec("data", None)


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["layers/0/w", "layers/1/w", "layers/2/w", "embedding"], (3, "layer")),
        (["block0/w", "block1/w"], (2, "block")),
        (["0/w", "1/w"], (2, "layer")),
        (["layers/0/w", "layers/0/mlp/0/w", "layers/1/w", "layers/1/mlp/0/w"], (2, "layer")),
        (["encoder/0/w", "encoder/1/w", "decoder/0/w", "decoder/1/w"], None),
        (["layers/0/w", "layers/1/v"], None),
        (["layers/0/w", "layers/1/w", "layers/2/v"], None),
        (["w", "v"], None),
    ],
)
def test_layers_are_equal_parts_with_numbers(paths, found):
    made = plan([leaf(f"state/params/{path}", (512, 512), REPLICATED) for path in paths], {"data": 2}, {"data": BATCH})
    assert count_layers(made) == found


def test_leaves_of_repeated_layers_are_one_group_with_their_moments():
    rows = group_layers(megatron())
    assert [(row.path, len(row.leaves)) for row in rows] == [
        ("state/params/layers/*/up", 4),
        ("state/params/layers/*/down", 4),
        ("batch/tokens", 1),
    ]
    assert rows[0].moments == (spec("data", "model"),)
    matrix = 512 * 2048 * 4
    assert rows[0].bytes == 4 * (matrix / 4 + 2 * matrix / 8)
