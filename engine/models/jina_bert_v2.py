"""JinaBERT v2: BERT without a position table; scores fall with the distance (ALiBi), and feed-forward layers are gated.

Its config.json says `model_type` bert, and names its own code: jinaai/jina-bert-implementation, `modeling_bert.py`.
"""

from __future__ import annotations

import dataclasses

from embert.engine.models.bert import CLASSIFICATION, DEFAULTS, MASKED_LM, read_bert_like
from embert.engine.models.config_file import ConfigFile
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.models.tensor_names import FusedWeight, TensorNames, WeightMapping

# `feed_forward_type` → the gate's activation. "original" is BERT's plain network.
GATES = {"geglu": "gelu", "reglu": "relu"}
GATED_PARTS: dict[str, str | FusedWeight] = {
    "intermediate.gate": FusedWeight("mlp.gated_layers", 0, 2),
    "intermediate.dense": FusedWeight("mlp.gated_layers", 1, 2),
    "output.dense": "mlp.wo",
    "output.LayerNorm": "mlp.layernorm",
    # These contain two of the names above.
    "attention.output.dense": "attention.output.dense",
    "attention.output.LayerNorm": "attention.output.LayerNorm",
}
# Another code of the same authors, whose config.json says the same otherwise: it normalizes queries and keys.
NORMALIZES = "jinaai/jina-bert-v2-qk-post-norm"


def read(config: ConfigFile) -> EncoderConfig:
    code = config.fields.get("auto_map")
    for reference in code.values() if isinstance(code, dict) else ():
        if str(reference).startswith(NORMALIZES):
            raise config.unsupported("auto_map", reference, ("jinaai/jina-bert-implementation",))
    kind = config.one_of("feed_forward_type", ("original", *GATES), "original")
    gated = kind in GATES
    tensors = TensorNames(
        (WeightMapping(parts=GATED_PARTS if gated else {}, prefixes=("bert.",)),),
        absent=frozenset({"intermediate.gate.bias", "intermediate.dense.bias"} if gated else ()),
        masked_lm=MASKED_LM,
        classification=CLASSIFICATION,
    )
    known = config.with_missing(**DEFAULTS).with_fields(position_embedding_type="absolute")
    encoder_config = read_bert_like(known, tensors)
    return dataclasses.replace(
        encoder_config,
        model_type="jina_bert_v2",
        position_table=False,
        alibi=True,
        gated=gated,
        activation=GATES.get(kind, encoder_config.activation),
    )
