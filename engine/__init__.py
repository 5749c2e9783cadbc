"""A model directory in, vectors out. Knows nothing of HTTP.

    engine = Engine.load("path/or/hub-id")
    vectors = engine.embed(["a text", "another"])  # float32 [2, width]

Importing this package imports neither torch, transformers nor huggingface_hub; each is imported when first needed.
"""

from engine import errors
from engine.encoders import Encoder, PackedBatch, Task, load_encoder
from engine.engine import Engine
from engine.model import Model, load_model
from engine.packing import pack
from engine.tokenizer import Encoded, Tokenizer

__all__ = [
    "Encoded",
    "Encoder",
    "Engine",
    "Model",
    "PackedBatch",
    "Task",
    "Tokenizer",
    "errors",
    "load_encoder",
    "load_model",
    "pack",
]
