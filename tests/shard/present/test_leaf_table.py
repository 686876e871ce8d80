"""Leaves of repeated layers are one group, with their optimizer state."""

from dataclasses import replace

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


@pytest.mark.parametrize(
    ("leaves", "found"),
    [
        ({"layers/w1": (16, 64, 64), "layers/w2": (16, 64, 64), "embedding": (100, 64)}, (16, "layer")),
        ({"layers/w1": (16, 64, 64), "layers/norm1": (16, 64), "layers/norm2": (16, 64)}, (16, "layer")),
        ({"blocks/w": (16, 64, 64)}, (16, "block")),
        ({"blocks/attention/w": (16, 64, 64), "blocks/mlp/w": (4, 4, 64, 64)}, (16, "block")),
        ({"encoder/w": (16, 64, 64), "decoder/w": (16, 64, 64)}, (16, "layer")),
        ({"encoder/w": (16, 64, 64), "decoder/w": (8, 64, 64)}, None),
        ({"layers/w": (16, 64, 64), "tail/0/w": (64, 64), "tail/1/w": (64, 64)}, None),
        ({"layers/0/w": (64, 64), "layers/1/w": (64, 64), "scales": (16, 64)}, (2, "layer")),
        ({"scales": (16, 64)}, None),
    ],
)
def test_layers_are_the_slices_that_loops_take_of_stacked_matrices(leaves, found):
    """Check leaves whose first dimensions, of 16 or 8 slices together, are those of a loop."""

    def sliced(shape):
        return 16 if shape[0] == 16 or shape[:2] == (4, 4) else 8 if shape[0] == 8 else 1

    parameters = [
        replace(leaf(f"state/params/{path}", shape, ((),) * len(shape)), slices=sliced(shape)) for path, shape in leaves.items()
    ]
    assert count_layers(plan(parameters, {"data": 2}, {"data": BATCH})) == found


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
