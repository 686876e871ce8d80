"""Each backbone that Keras Hub exports has a small configuration that trains, or a reason why it has none."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from tests.extras import require

from penstock_bench.suites.shard.hub import BACKBONES, DEEP, NOT_BUILT, batch, trained

ROWS = 8


def weights(model):
    return [np.array(each.value) for each in model.trainable_variables]


def test_every_exported_backbone_has_a_configuration_or_a_reason_why_it_has_none():
    keras_hub = require("keras_hub")  # and with it TensorFlow, as late as possible
    exported = {name for name in dir(keras_hub.models) if name.endswith("Backbone")}
    assert {*BACKBONES, *NOT_BUILT} == exported
    assert not {*BACKBONES} & {*NOT_BUILT}
    assert len(DEEP) == 12
    assert set(DEEP) <= set(BACKBONES)
    for name, reason in NOT_BUILT.items():
        made = getattr(keras_hub.models, name).__name__
        assert made == name or reason == f"It is another name of {made}."


def test_a_batch_has_rows_of_known_values():
    for name in BACKBONES:
        arrays = batch(name, ROWS, seed=0)
        assert {len(each) for each in arrays.values()} == {ROWS}, name
        for key, each in batch(name, ROWS, seed=0).items():
            np.testing.assert_array_equal(each, arrays[key])


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="'Backbone' is no backbone with a configuration"):
        batch("Backbone", ROWS, seed=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask attached to it:UserWarning")
@pytest.mark.parametrize("name", DEEP[::2])  # the benchmark trains all others too
def test_a_backbone_trains(name):
    require("keras_hub")
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = trained(name)
    before = weights(model)
    history = model.fit(batch(name, ROWS, seed=0), np.zeros(ROWS), batch_size=ROWS, epochs=1, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    after = weights(model)
    assert all(np.isfinite(each).all() for each in after)
    assert any((old != new).any() for old, new in zip(before, after, strict=True))


def test_a_step_has_the_paths_of_keras_and_the_layout_map_of_its_class():
    require("keras_hub")
    from penstock_bench.suites.shard.baselines import baselines, leaf_paths
    from penstock_bench.suites.shard.hub import step

    model = step.load("LlamaBackbone")
    state = model.init()
    assert "trainable/token_embedding/embeddings" in leaf_paths(state)
    assert "optimizer/momentum/token_embedding/embeddings" in leaf_paths(state)
    (by_map,) = [each for each in baselines(model, state, model.batch(0), {"data": 2, "model": 4}) if "map" in each.name]
    layouts = dict(zip(leaf_paths(state), by_map.state, strict=True))
    assert layouts["trainable/token_embedding/embeddings"] == (("model",), ("data",))
    assert layouts["optimizer/momentum/token_embedding/embeddings"] == (("model",), ("data",))


def test_all_are_planned_on_two_meshes_and_the_twelve_for_a_tight_limit_too():
    import argparse

    from penstock_bench.suites.shard import add_arguments, choose

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    plans, fits = choose(parser.parse_args(["--suite", "keras"]))
    assert len(plans.variants) == 2 * len(BACKBONES)
    assert len(fits.variants) == 2 * len(DEEP)
