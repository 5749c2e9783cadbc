"""The sentences that encoders are compared on: plain English, eight on each of 26 subjects."""

from __future__ import annotations

import math
from importlib.resources import files

from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.models.tensor_shapes import tensor_shapes

__all__ = ["affordable", "sentences"]

# Sentences times parameters of the layers: on two cores of an EPYC they take a float32 encoder about a second.
_PARAMETER_SENTENCES = 208 * 11_000_000
_LEAST = 40  # whatever the model's size: each has ten neighbors among them


def sentences() -> list[str]:
    """All of them."""
    return (files("embert.engine.int8_accuracy") / "sentences.txt").read_text("utf-8").splitlines()


def affordable(config: EncoderConfig, *, on_cpu: bool) -> list[str]:
    """Those to compare a model on: all, or on a CPU as many as keep a large model's start short, from all subjects."""
    every = sentences()
    if not on_cpu:
        return every
    shapes = tensor_shapes(config)
    used = [name for name in shapes if name.startswith("encoder.layer.")]
    repeats = config.layers / max(1, len({config.stored_layer(n) for n in range(config.layers)}))
    parameters = repeats * sum(math.prod(shapes[name]) for name in used)
    count = min(len(every), max(_LEAST, int(_PARAMETER_SENTENCES / max(1, parameters))))
    return [every[number * len(every) // count] for number in range(count)]
