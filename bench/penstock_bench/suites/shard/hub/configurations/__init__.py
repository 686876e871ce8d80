"""The configurations of all backbones, by the names of their classes."""

from __future__ import annotations

from collections.abc import Mapping

from penstock_bench.suites.shard.hub.configuration import Configuration
from penstock_bench.suites.shard.hub.configurations.dense_prediction import DENSE_PREDICTION
from penstock_bench.suites.shard.hub.configurations.diffusion import DIFFUSION
from penstock_bench.suites.shard.hub.configurations.gemma import GEMMA
from penstock_bench.suites.shard.hub.configurations.image_encoders import IMAGE_ENCODERS
from penstock_bench.suites.shard.hub.configurations.speech import SPEECH
from penstock_bench.suites.shard.hub.configurations.text_decoders import TEXT_DECODERS
from penstock_bench.suites.shard.hub.configurations.text_encoders import TEXT_ENCODERS
from penstock_bench.suites.shard.hub.configurations.vision_language import VISION_LANGUAGE

CONFIGURATIONS: Mapping[str, Configuration] = {
    **TEXT_ENCODERS,
    **TEXT_DECODERS,
    **IMAGE_ENCODERS,
    **DENSE_PREDICTION,
    **VISION_LANGUAGE,
    **GEMMA,
    **SPEECH,
    **DIFFUSION,
}
