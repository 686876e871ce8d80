"""Models of Keras Hub train under a plan, and their presets are loaded in shards."""

import jax
import keras
import numpy as np
import pytest
from tests.extras import require
from tests.keras.autoshard.models import history, shards

import penstock.keras as pk

keras_hub = require("keras_hub")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of TensorFlow, and of Keras's conversion to NumPy
]
ROWS, LENGTH, VOCABULARY = 8, 16, 512
SMALL = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 2,
    "num_query_heads": 8,
    "num_key_value_heads": 1,
    "hidden_dim": 64,
    "intermediate_dim": 256,
}


def gemma():
    """A language model with one head of keys and values, as Gemma 2B has."""
    backbone = keras_hub.models.GemmaBackbone(head_dim=16, **SMALL)
    model = keras_hub.models.GemmaCausalLM(backbone, preprocessor=None)
    model.compile(keras.optimizers.AdamW(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def mixtral():
    """A language model with experts."""
    backbone = keras_hub.models.MixtralBackbone(num_experts=8, top_k=2, **{**SMALL, "num_key_value_heads": 4})
    model = keras_hub.models.MixtralCausalLM(backbone, preprocessor=None)
    model.compile(keras.optimizers.AdamW(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def batch(rows=ROWS):
    tokens = np.random.default_rng(0).integers(1, VOCABULARY, (rows, LENGTH + 1)).astype("int32")
    return {"token_ids": tokens[:, :-1], "padding_mask": np.ones((rows, LENGTH), "int32")}, tokens[:, 1:]


def fit(model):
    x, y = batch(3 * ROWS)
    return model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)


@pytest.mark.parametrize("shape", [(4, 2), (2, 4)])
def test_one_key_value_head_on_a_model_axis(shape):
    """Keras Hub's layout map splits this head over the model axis, which does not divide it."""
    mesh = keras.distribution.DeviceMesh(shape, ["data", "model"])
    alone = history(gemma, fit)["loss"]
    planned = history(gemma, fit, pk.AutoShardDistribution(mesh))["loss"]
    np.testing.assert_allclose(planned, alone, rtol=1e-4)


def test_experts_are_not_replicated():
    x, y = batch()
    keras.utils.set_random_seed(0)
    mesh = keras.distribution.DeviceMesh((2, 4), ["data", "model"])
    loose = pk.AutoShardDistribution(mesh)
    replicated = loose.plan(mixtral, (x, y)).alternatives["data parallel"].cost.memory.total
    distribution = pk.AutoShardDistribution(mesh, memory=replicated // 2)
    with distribution.scope():
        model = mixtral()
        model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    experts = [each for each in model.variables if "expert" in each.path and each.value.size > 10_000]
    assert experts
    assert all(shards(each) >= 4 for each in experts)


def test_a_preset_is_loaded_in_shards(tmp_path):
    model = gemma()
    model.save_to_preset(tmp_path / "preset")
    x, y = batch()
    with pk.AutoShardDistribution().scope():
        loaded = keras_hub.models.CausalLM.from_preset(str(tmp_path / "preset"))
        large = [each for each in loaded.backbone.variables if each.value.size > 1000]
        assert all(shards(each) == 8 for each in large)
        for ours, theirs in zip(loaded.backbone.variables, model.backbone.variables, strict=True):
            np.testing.assert_array_equal(np.asarray(ours.value), np.asarray(theirs.value))
        loaded.compile("adamw", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        loaded.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    assert len(loaded.backbone.token_embedding.embeddings.value.sharding.device_set) == jax.device_count()


def test_lora_of_a_backbone():
    def build():
        model = gemma()
        model.backbone.enable_lora(4)
        model.compile(keras.optimizers.AdamW(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    alone, planned = history(build, fit)["loss"], history(build, fit, pk.AutoShardDistribution())["loss"]
    np.testing.assert_allclose(planned, alone, rtol=1e-4)
