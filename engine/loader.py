"""Loads a model's weights into an encoder, and measures what int8 costs where it is asked for."""

from __future__ import annotations

from embert.engine.encoders.base import Encoder
from embert.engine.encoders.loader import create_encoder
from embert.engine.errors import UnsupportedModel
from embert.engine.int8_accuracy import check_accuracy, compare, encode_sentences
from embert.engine.model import Model
from embert.engine.quantization import MIN_ACCURACY
from embert.engine.quantization.accuracy import Int8Accuracy

REFERENCE_TOKENS = 2048  # of a batch of the reference encoder; no text of the corpus is longer


def load_encoder(
    model: Model,
    *,
    device: str = "auto",
    dtype: str = "auto",
    max_batch_tokens: int | None = None,
    encoder: str = "auto",
    min_agreement: float = MIN_ACCURACY,
) -> Encoder:
    """Load a model's weights into an encoder that is ready to run.

    `device` is "auto" (a CUDA device if this build and this machine have one), "cpu", "cuda" or "cuda:N".
    `dtype` is "auto" (float16 on CUDA, float32 on a CPU), "float32", "float16", "bfloat16" or "int8".
    `max_batch_tokens` is the largest batch, in tokens, that the encoder takes; None is the encoder's own choice.
    `encoder` is "auto", "cuda", "cuda-portable" (CUDA without Hopper's own kernels, as other GPUs run it, for
    comparison), "cpu" (our own kernels for CPUs), "torch" (the reference implementation for any CPU, which "auto" takes
    where kernels are missing), or "package.module:factory", called as `load_encoder` is, without `encoder`.

    The encoder's `choice` says in one sentence why it was chosen. Raises UnsupportedModel for a device or dtype that
    is not available, for a model that the encoder cannot run and where torch is needed and missing, BrokenModel for
    weights that cannot be read.

    With `dtype` "int8" the encoder is compared with the same model in the device's default dtype, and its
    `int8_accuracy` and `choice` state the result. Both encoders are in memory during the comparison. Raises
    UnsupportedModel where the worst text's accuracy is below `min_agreement`, which is in 0 to 1.
    """
    if not 0 <= min_agreement <= 1:
        raise UnsupportedModel(f"min_agreement must be 0 to 1, found {min_agreement}")
    instance = create_encoder(model, device=device, dtype=dtype, max_batch_tokens=max_batch_tokens, encoder=encoder)
    if dtype != "int8":
        return instance
    try:
        instance.int8_accuracy = _measure_int8(model, instance, encoder)
        check_accuracy(instance.int8_accuracy, model, min_agreement)
    except BaseException:
        instance.close()
        raise
    instance.choice = "; ".join(filter(None, (instance.choice, str(instance.int8_accuracy))))
    return instance


def _measure_int8(model: Model, int8: Encoder, encoder: str) -> Int8Accuracy:
    encoded = encode_sentences(model, on_cpu=int8.device == "cpu")
    tokens = max(REFERENCE_TOKENS, int(encoded.lengths.max()))
    # If int8 runs on the CPU, because CUDA is not available, the reference does too.
    kind = "cpu" if int8.name == "cpu" else encoder
    reference = create_encoder(model, device=int8.device, max_batch_tokens=tokens, encoder=kind, prepared=False)
    try:
        return compare(model, encoded, int8, reference)
    finally:
        reference.close()
