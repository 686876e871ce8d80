"""A key of the user's layout map that matches no variable is a warning, once; no other key is."""

import keras
import pytest
from keras import layers
from tests.keras.autoshard.models import BATCH, CLASSES, FEATURES, Subclassed, compiled, records

import penstock.keras as pk

# Keras's conversion of a variable to NumPy
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def layout_map(*keys: str) -> keras.distribution.LayoutMap:
    made = keras.distribution.LayoutMap(keras.distribution.DeviceMesh((2, 4), ["data", "model"]))
    for key in keys:
        made[key] = (None, "model")
    return made


def named(name: str) -> keras.Model:
    inner = [layers.Dense(16, "relu", name="inner"), layers.Dense(CLASSES, "softmax", name="head")]
    return compiled(keras.Sequential(inner, name=name))


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("inner/kernel", "'net/inner/kernel'"),  # not the whole path
        ("net/inner", "'net/inner/"),  # a layer, not a variable
        (".*dense_3/kernel", "'net/"),  # a layer of another model
        (".*inner.kernels", "'net/inner/kernel'"),  # a misspelt name
        (".*momentum.*", "'net/"),  # a variable of the optimizer, over which the map has no say
        (".*accuracy/total", "'net/"),
    ],
)
def test_a_key_that_matches_no_variable_is_a_warning(key, nearest):
    distribution = pk.AutoShardDistribution(layout_map=layout_map(".*head/kernel", key))
    with distribution.scope():
        model = named("net")
        with pytest.warns(UserWarning, match="match no variable so far") as caught:
            model.train_on_batch(*records(BATCH))
        (text,) = [str(each.message) for each in caught]
        assert f"{key!r} (the nearest are {nearest}" in text
        assert "head/kernel' (" not in text
        model.evaluate(*records(BATCH), verbose=0)  # does not warn again


def test_many_keys_are_one_warning():
    keys = [f"block_{number}/kernel" for number in range(9)]
    with pytest.warns(UserWarning, match=r"'block_2/kernel' \(.*, 6 more\. Keras compares") as caught:
        pk.AutoShardDistribution(layout_map=layout_map(*keys)).plan(lambda: named("net"), records(BATCH))
    assert len(caught) == 1


@pytest.mark.parametrize("key", ["*kernel", "head/(kernel", "head/[kernel"])
def test_a_key_that_is_no_regular_expression_is_refused(key):
    distribution = pk.AutoShardDistribution(layout_map=layout_map(key))
    with pytest.raises(ValueError, match=r"is no regular expression \(.*write '\.\*' where a shell has '\*'") as caught:
        distribution.plan(lambda: named("net"), records(BATCH))
    assert f"layout_map[{key!r}]" in str(caught.value)


# A warning fails these tests.


def test_a_key_for_another_model_of_the_scope_is_no_alarm():
    distribution = pk.AutoShardDistribution(layout_map=layout_map("one/inner/kernel", "two/inner/kernel"))
    with distribution.scope():
        first, second = named("one"), named("two")
        first.build((None, FEATURES))
        second.build((None, FEATURES))
        for model in (first, second):
            model.train_on_batch(*records(BATCH))
            assert tuple(model.get_layer("inner").kernel.value.sharding.spec) == (None, "model")


def test_a_model_whose_layers_the_first_batch_builds_is_no_alarm():
    distribution = pk.AutoShardDistribution(layout_map=layout_map(".*dense.*/kernel"))
    with distribution.scope():
        compiled(Subclassed()).train_on_batch(*records(BATCH))


def test_a_key_that_exact_paths_shadow_is_no_alarm():
    distribution = pk.AutoShardDistribution(layout_map=layout_map("net/inner/kernel", "net/head/kernel", "net/.*/kernel"))
    distribution.plan(lambda: named("net"), records(BATCH))
