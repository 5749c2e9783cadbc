"""Loads an encoder. One in eight bits is compared with the same model in more; it may agree too little."""

from __future__ import annotations

from embert.engine.encoders import loader
from embert.engine.encoders.base import Encoder
from embert.engine.errors import UnsupportedModel
from embert.engine.int8_accuracy import MIN_ACCURACY
from embert.engine.int8_accuracy.corpus import affordable
from embert.engine.int8_accuracy.rows import compared, encoded_for
from embert.engine.model import Model
from embert.engine.quantization.accuracy import Int8Accuracy
from embert.engine.tokenization.tokenizer import Tokenizer

__all__ = ["load_encoder"]

REFERENCE_TOKENS = 2048  # of a batch of the encoder compared with; no text of the corpus is longer


def load_encoder(
    model: Model,
    *,
    device: str = "auto",
    dtype: str = "auto",
    max_batch_tokens: int | None = None,
    encoder: str = "auto",
    min_agreement: float = MIN_ACCURACY,
) -> Encoder:
    """As `loader.load_encoder`. With `dtype` "int8" the encoder's `agreement` and `choice` say what that costs.

    It is then compared with the model in the device's usual dtype, on the sentences of corpus.py. For a moment both are
    in memory. Raises UnsupportedModel, too, where the worst agreement is below `min_agreement`, which is 0 … 1.
    """
    if not 0 <= min_agreement <= 1:
        raise UnsupportedModel(f"min_agreement must be 0 to 1, found {min_agreement}")
    built = loader.load_encoder(model, device=device, dtype=dtype, max_batch_tokens=max_batch_tokens, encoder=encoder)
    if dtype != "int8":
        return built
    try:
        built.agreement = _measured(model, built, encoder)
        _check(built.agreement, model, min_agreement)
    except BaseException:
        built.close()
        raise
    built.choice = "; ".join(filter(None, (built.choice, str(built.agreement))))
    return built


def _check(found: Int8Accuracy, model: Model, least: float) -> None:
    if found.worst >= least:
        return
    # Not a number is too little, too.
    raise UnsupportedModel(
        f"{model.model_id} in int8 agrees too little with {found.dtype}: its worst {found.measure} over {found.texts} "
        f"sentences is {found.worst:.4f}, at least {least:g} is asked for; use another --dtype, or lower "
        "--min-agreement"
    )


def _measured(model: Model, ours: Encoder, encoder: str) -> Int8Accuracy:
    texts = affordable(model.config, on_cpu=ours.device == "cpu")
    encoded = encoded_for(model, Tokenizer(model), texts)
    tokens = max(REFERENCE_TOKENS, int(encoded.lengths.max()))
    # Where a CUDA encoder was not to be had for int8, there is no use in comparing with one.
    named = "torch" if ours.name == "torch" else encoder
    theirs = loader.load_encoder(model, device=ours.device, max_batch_tokens=tokens, encoder=named, prepared=False)
    try:
        return compared(model, encoded, ours, theirs)
    finally:
        theirs.close()
