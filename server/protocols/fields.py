"""The fields of every route, by the APIs whose references have them: honored, harmless, or refused.

`RequestBody.known` of each schema is one of these tables; docs/fields.py writes them into docs/api.md. A field that
changes what an answer means is honored or refused, never dropped. What is in no table is named in the header
`x-embert-ignored-fields`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from embert.server.request.known_fields import Fields, KnownField, Verdict, known

__all__ = [
    "CLASSIFY",
    "COHERE_EMBED",
    "COHERE_RERANK",
    "DECODE",
    "DETOKENIZE",
    "ELSEWHERE",
    "EMBED",
    "EMBEDDINGS",
    "EMBED_ALL",
    "EMBED_SPARSE",
    "POOLING",
    "PREDICT",
    "PREDICT_PARAMETERS",
    "RANKING",
    "RERANK",
    "SCORE",
    "SIMILARITY",
    "SIMILARITY_INPUTS",
    "SIMILARITY_PARAMETERS",
    "TEI_RERANK",
    "TOKENIZE",
    "VERTEX",
]

HONORED, HARMLESS, REFUSED = Verdict.HONORED, Verdict.HARMLESS, Verdict.REFUSED

# --- other words for the same ---


def _as(target: str) -> dict[str, Any]:
    """Another name of a field."""
    return {"reason": f"as `{target}`", "translation": lambda value: {target: value}}


def _not(target: str) -> dict[str, Any]:
    """The opposite of a field."""

    def opposite(value: Any) -> Mapping[str, Any]:
        value = {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value
        return {target: not value if isinstance(value, bool) else value}

    return {"reason": f"the opposite of `{target}`", "translation": opposite}


def _cuts(side: str) -> Callable[[Any], Mapping[str, Any]]:
    """Cohere's and NVIDIA's words for whether and where texts are cut; `side` is the schema's field for the latter."""
    words: dict[str, dict[str, Any]] = {
        "NONE": {"truncate": False},
        "START": {"truncate": True, side: "left"},
        "END": {"truncate": True, side: "right"},
        "LEFT": {"truncate": True, side: "left"},
        "RIGHT": {"truncate": True, side: "right"},
    }

    def translated(value: Any) -> Mapping[str, Any]:
        return words.get(value.upper(), {"truncate": value}) if isinstance(value, str) else {"truncate": value}

    return translated


def _number_type(value: Any) -> Mapping[str, Any]:
    """Jina's and NVIDIA's `embedding_type`, which has base64 among the types of numbers."""
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    return {"encoding_format": value} if value == "base64" else {"output_dtype": value}


# --- of every route ---

_EVERY: Fields = {
    **known("user", HARMLESS, "OPENAI VLLM INFINITY NVIDIA", "it says whose request this is"),
    **known("request_id", HARMLESS, "VLLM", "the header `x-request-id` names a request"),
    **known("cache_salt", HARMLESS, "VLLM", "no answer is kept for other requests"),
    **known("metadata", HARMLESS, "MISTRAL", "a note for the caller's own logs"),
    **known("mm_processor_kwargs media_io_kwargs", HARMLESS, "VLLM", "only images are read with them"),
    **known("options", HARMLESS, "HUGGING_FACE", "about waiting for a model, and a cache, that are not here"),
    **known(
        "messages chat_template chat_template_kwargs tools",
        REFUSED,
        "VLLM",
        "texts are read as they are, and not as chats",
    ),
    **known(
        "add_generation_prompt continue_final_message", REFUSED, "VLLM", "texts are not read as chats", unless=(False,)
    ),
    **known("padding", REFUSED, "VLLM", "nothing is padded", unless=("do_not_pad",)),
    **known("modality", REFUSED, "INFINITY NVIDIA", "models read texts only", unless=("text",)),
    **known("image images", REFUSED, "JINA COHERE", "models read texts only", unless=([],)),
}
_MODEL: Fields = known("model", HONORED, "OPENAI VLLM INFINITY JINA VOYAGE MISTRAL COHERE NVIDIA")
_NO_MODEL: Fields = {
    **known("model", HARMLESS, "TEI HUGGING_FACE", "the path chooses the model on TEI's routes"),
    **known("priority", HARMLESS, "VLLM COHERE", "the header `x-priority` says it on TEI's routes"),
}
_PRIORITY: Fields = known("priority", HONORED, "VLLM COHERE")
_SPECIAL_TOKENS: Fields = known(
    "add_special_tokens", REFUSED, "VLLM", "the model reads the first of them", unless=(True,)
)
_CUT_TOKENS: Fields = known("truncate_prompt_tokens truncation_side", HONORED, "VLLM")

# --- embeddings ---

# Jina's own features, which no other server has, and fields that would change the vectors.
_OTHER_VECTORS: Fields = {
    **known("late_chunking", REFUSED, "JINA", "texts are encoded independently", unless=(False,)),
    **known("return_multivector", REFUSED, "JINA", "`embedding_types` asks for these", unless=(False,)),
    **known("prompt instruction", REFUSED, "XINFERENCE", "`prompt_name` chooses one of the model's own prompts"),
    **_SPECIAL_TOKENS,
}
EMBEDDINGS: dict[str, KnownField] = {
    **_EVERY,
    **_OTHER_VECTORS,
    **_MODEL,
    **_PRIORITY,
    **_CUT_TOKENS,
    **known("input encoding_format", HONORED, "OPENAI VLLM TEI INFINITY JINA VOYAGE MISTRAL NVIDIA"),
    **known("dimensions", HONORED, "OPENAI VLLM TEI INFINITY JINA NVIDIA"),
    **known("truncate", HONORED, "JINA NVIDIA EMBERT", translation=_cuts("truncation_side")),
    **known("truncation", HONORED, "VOYAGE", **_as("truncate")),
    **known("truncation_direction", HONORED, "EMBERT", **_as("truncation_side")),
    **known("prompt_name normalize embedding_types", HONORED, "EMBERT"),
    **known("normalized", HONORED, "JINA", **_as("normalize")),
    **known("use_activation", HONORED, "VLLM", **_as("normalize")),
    **known("task", HONORED, "JINA"),
    **known("input_type", HONORED, "VOYAGE NVIDIA EMBERT"),
    **known("output_dimension", HONORED, "VOYAGE MISTRAL", **_as("dimensions")),
    **known("output_dtype", HONORED, "VOYAGE MISTRAL"),
    **known(
        "embedding_type encoding_type",
        HONORED,
        "JINA NVIDIA",
        "as `output_dtype`; base64: as `encoding_format`",
        translation=_number_type,
    ),
    **known("embed_dtype", REFUSED, "VLLM", "numbers are float32 here, others in /pooling", unless=("float32",)),
    **known(
        "endianness", REFUSED, "VLLM", "numbers are little-endian here, others in /pooling", unless=("native", "little")
    ),
}
POOLING: dict[str, KnownField] = {
    **_EVERY,
    **_OTHER_VECTORS,
    **_MODEL,
    **_PRIORITY,
    **_CUT_TOKENS,
    **known("input encoding_format dimensions", HONORED, "VLLM"),
    **known("task embed_dtype endianness use_activation", HONORED, "VLLM"),
    **known("input_type", HONORED, "EMBERT"),
    **known("normalize activation softmax", REFUSED, "VLLM", "they are older names of `use_activation`"),
    **known("data", REFUSED, "VLLM", "no plug-in reads it; texts go into `input`"),
    **known("output_dimension", HONORED, "VOYAGE MISTRAL", **_as("dimensions")),
}

_TEI_READING: Fields = {
    **known("truncate", HONORED, "TEI", translation=_cuts("truncation_direction")),
    **known("truncation_direction", HONORED, "TEI"),
    **known("truncation", HONORED, "VOYAGE", **_as("truncate")),
    **known("truncation_side", HONORED, "VLLM", **_as("truncation_direction")),
    **known("truncate_prompt_tokens", REFUSED, "VLLM", "/v1/embeddings and /pooling have it"),
}
_NUMBERS_ONLY: Fields = {
    **known(
        "encoding_format", REFUSED, "OPENAI", "numbers are JSON here; /v1/embeddings has base64", unless=("float",)
    ),
    **known("output_dtype embedding_type", REFUSED, "VOYAGE MISTRAL JINA", "/v1/embeddings has it", unless=("float",)),
    **known("embedding_types", REFUSED, "COHERE EMBERT", "/v1/embeddings and /v2/embed have it"),
    **known("embed_dtype", REFUSED, "VLLM", "/pooling has it", unless=("float32",)),
    **known("endianness", REFUSED, "VLLM", "/pooling has it", unless=("native", "little")),
}
_PARAMETERS: Fields = known(
    "parameters", HONORED, "HUGGING_FACE", "its fields count as the request's own", is_flat=True
)
EMBED_SPARSE: dict[str, KnownField] = {
    **_EVERY,
    **_OTHER_VECTORS,
    **_NO_MODEL,
    **_TEI_READING,
    **_NUMBERS_ONLY,
    **_PARAMETERS,
    **known("inputs prompt_name", HONORED, "TEI"),
    **known("task", HONORED, "EMBERT"),
    **known("input_type", REFUSED, "VOYAGE NVIDIA COHERE", "`prompt_name` chooses one of the model's prompts"),
    **known(
        "dimensions output_dimension", REFUSED, "OPENAI VOYAGE MISTRAL", "these vectors have no dimensions to cut off"
    ),
    **known("normalize normalized use_activation", REFUSED, "TEI JINA VLLM", "these vectors are not scaled",
            unless=(False,)),
}  # fmt: skip
EMBED_ALL: dict[str, KnownField] = {**EMBED_SPARSE, **known("input_type", HONORED, "EMBERT")}
EMBED: dict[str, KnownField] = {
    **EMBED_SPARSE,
    **known("normalize dimensions", HONORED, "TEI"),
    **known("normalized", HONORED, "JINA", **_as("normalize")),
    **known("use_activation", HONORED, "VLLM", **_as("normalize")),
    **known("output_dimension", HONORED, "VOYAGE MISTRAL", **_as("dimensions")),
}
_SIMILARITY: Fields = {**_EVERY, **_OTHER_VECTORS, **_NO_MODEL}
SIMILARITY: dict[str, KnownField] = {
    **_SIMILARITY,
    **known("inputs parameters", HONORED, "TEI HUGGING_FACE"),
    **known("truncate truncation_direction prompt_name task", REFUSED, "TEI", "it belongs into `parameters`"),
    # litellm names the hub's task so.
    **known("input_type", REFUSED, "VOYAGE NVIDIA COHERE", "other routes have it", unless=("sentence-similarity",)),
}
SIMILARITY_INPUTS: Fields = known("source_sentence sentences", HONORED, "TEI HUGGING_FACE")
SIMILARITY_PARAMETERS: Fields = {
    **_SIMILARITY,
    **_TEI_READING,
    **known("prompt_name", HONORED, "TEI"),
    **known("task", HONORED, "EMBERT"),
    **known("normalize normalized", REFUSED, "TEI JINA", "cosines do not depend on it", unless=(True, False)),
    **known("dimensions output_dimension", REFUSED, "OPENAI", "cosines are of whole vectors"),
}
COHERE_EMBED: dict[str, KnownField] = {
    **_EVERY,
    **_OTHER_VECTORS,
    **_MODEL,
    **_PRIORITY,
    **known("texts inputs input_type embedding_types max_tokens output_dimension", HONORED, "COHERE"),
    **known("truncate", HONORED, "COHERE"),
    **known("dimensions", HONORED, "OPENAI", **_as("output_dimension")),
    **known(
        "normalize normalized use_activation",
        REFUSED,
        "TEI JINA VLLM",
        "these vectors have length 1; /embed has others",
        unless=(True,),
    ),
    **known("encoding_format", REFUSED, "OPENAI", "`embedding_types` has base64", unless=("float",)),
}

# --- scores ---

_PAIRS: Fields = {
    **_EVERY,
    **_SPECIAL_TOKENS,
    **_PRIORITY,
    **_CUT_TOKENS,
    **known("max_tokens_per_query max_tokens_per_doc use_activation", HONORED, "VLLM"),
    **known("instruction", REFUSED, "VLLM XINFERENCE", "models read only the query and the document"),
    **known("activation softmax", REFUSED, "VLLM", "older names of `use_activation`"),
}
RERANK: dict[str, KnownField] = {
    **_PAIRS,
    **_MODEL,
    **known("query", HONORED, "VLLM TEI INFINITY JINA VOYAGE COHERE"),
    **known("documents", HONORED, "VLLM INFINITY JINA VOYAGE COHERE"),
    **known("top_n", HONORED, "VLLM INFINITY JINA COHERE"),
    **known("top_k", HONORED, "VOYAGE", **_as("top_n")),
    **known("return_documents", HONORED, "INFINITY JINA VOYAGE COHERE"),
    **known("return_text", HONORED, "TEI", **_as("return_documents")),
    **known("raw_scores", HONORED, "TEI INFINITY"),
    **known("max_tokens_per_query max_tokens_per_doc", HONORED, "VLLM COHERE"),
    **known("truncate", HONORED, "NVIDIA EMBERT", translation=_cuts("truncation_side")),
    **known("truncation", HONORED, "VOYAGE", **_as("truncate")),
    **known("truncation_direction", HONORED, "EMBERT", **_as("truncation_side")),
    **known("texts", HONORED, "TEI", **_as("documents"), ignored_beside="documents"),
    **known(
        "max_chunks_per_doc overlap_tokens", HARMLESS, "COHERE XINFERENCE", "a document is one chunk, which may be cut"
    ),
    **known("return_len", HARMLESS, "XINFERENCE", "`usage` and `meta` have the tokens"),
    **known("rank_fields", REFUSED, "COHERE", "no other field of a document is read", unless=(["text"],)),
}
TEI_RERANK: dict[str, KnownField] = {
    **RERANK,
    **known("texts truncation_direction return_text", HONORED, "TEI"),
    **known("documents", HONORED, "VLLM INFINITY JINA", ignored_beside="texts"),
    **known("model", HONORED, "VLLM INFINITY JINA", ignored_beside="texts"),
    **known("truncate", HONORED, "TEI NVIDIA", translation=_cuts("truncation_direction")),
}
COHERE_RERANK: dict[str, KnownField] = {
    **_EVERY,
    **_MODEL,
    **_PRIORITY,
    **known("query documents top_n max_tokens_per_doc return_documents", HONORED, "COHERE"),
    **known("top_k", HONORED, "VOYAGE", **_as("top_n")),
    **known("relevant_spans", REFUSED, "COHERE", "documents have scores as a whole", unless=({"mode": "disabled"},)),
    **known("max_chunks_per_doc", HARMLESS, "COHERE", "a document is one chunk, which may be cut"),
    **known("rank_fields", REFUSED, "COHERE", "a document is a string", unless=(["text"],)),
    **known("raw_scores", REFUSED, "TEI INFINITY", "/v1/rerank has it", unless=(False,)),
    **known("use_activation", REFUSED, "VLLM", "/v1/rerank has it", unless=(True,)),
    **known("truncation truncate", REFUSED, "VOYAGE NVIDIA", "/v1/rerank has it", unless=(True, "END")),
    **known("truncate_prompt_tokens max_tokens_per_query", REFUSED, "VLLM", "/v1/rerank has it"),
    **known("truncation_side", REFUSED, "VLLM", "/v1/rerank has it", unless=("right",)),
    **known("instruction", REFUSED, "VLLM", "models read only the query and the document"),
}
RANKING: dict[str, KnownField] = {
    **_EVERY,
    **_MODEL,
    **known("query passages truncate", HONORED, "NVIDIA"),
    **known("top_n", HONORED, "EMBERT"),
    **known("top_k", HONORED, "VOYAGE", **_as("top_n")),
}
SCORE: dict[str, KnownField] = {
    **_PAIRS,
    **_MODEL,
    **known("queries documents items text_1 text_2 data_1 data_2", HONORED, "VLLM"),
    **known("raw_scores", HONORED, "INFINITY", **_not("use_activation")),
}

# --- classes ---

CLASSIFY: dict[str, KnownField] = {
    **_EVERY,
    **_MODEL,
    **_PRIORITY,
    **_CUT_TOKENS,
    **_SPECIAL_TOKENS,
    **known("input", HONORED, "VLLM INFINITY"),
    **known("use_activation", HONORED, "VLLM"),
    **known("raw_scores", HONORED, "INFINITY", **_not("use_activation")),
    **known("activation softmax", REFUSED, "VLLM", "older names of `use_activation`"),
    **known("labels classifier_id", REFUSED, "JINA", "a model has labels of its own"),
}
PREDICT: dict[str, KnownField] = {
    **_EVERY,
    **_NO_MODEL,
    **known("inputs", HONORED, "TEI HUGGING_FACE"),
    **known("raw_scores", HONORED, "TEI"),
    **known("truncate", HONORED, "TEI", translation=_cuts("truncation_direction")),
    **known("truncation_direction", HONORED, "TEI"),
    **known("parameters", HONORED, "HUGGING_FACE"),
    **known("function_to_apply top_k", REFUSED, "HUGGING_FACE", "it belongs into `parameters`"),
    **known("use_activation", HONORED, "VLLM", **_not("raw_scores")),
    **known("truncation", HONORED, "VOYAGE", **_as("truncate")),
    **known("truncation_side", HONORED, "VLLM", **_as("truncation_direction")),
    **known("truncate_prompt_tokens", REFUSED, "VLLM", "/classify has it"),
}
PREDICT_PARAMETERS: Fields = {
    **known("function_to_apply top_k", HONORED, "HUGGING_FACE"),
    **known("return_all_scores", REFUSED, "HUGGING_FACE", "`top_k` says how many are answered", unless=(True,)),
    **known("padding", HARMLESS, "HUGGING_FACE", "nothing is padded"),
    **known("truncation", REFUSED, "HUGGING_FACE", "`truncate`, beside `parameters`, says it", unless=(True,)),
    **known("max_length", REFUSED, "HUGGING_FACE", "texts are cut to what the model takes"),
}

# --- tokens ---

TOKENIZE: dict[str, KnownField] = {
    **_EVERY,
    **known("inputs prompt_name", HONORED, "TEI"),
    **known("add_special_tokens", HONORED, "TEI VLLM"),
    **known("prompt return_token_strs", HONORED, "VLLM"),
    **known("model", HONORED, "VLLM", ignored_beside="inputs"),
}
DETOKENIZE: dict[str, KnownField] = {**_EVERY, **_MODEL, **known("tokens", HONORED, "VLLM")}
DECODE: dict[str, KnownField] = {**_EVERY, **_NO_MODEL, **known("ids skip_special_tokens", HONORED, "TEI")}
VERTEX: dict[str, KnownField] = {
    **_EVERY,
    **_NO_MODEL,
    **known("instances", HONORED, "TEI"),
    **known("parameters", REFUSED, "HUGGING_FACE", "each instance has its own fields", unless=({},)),
}

# --- on other routes ---

ELSEWHERE = "other routes have it, and this one does not read it"
_TABLES = (
    EMBEDDINGS, POOLING, EMBED, EMBED_SPARSE, EMBED_ALL, SIMILARITY, COHERE_EMBED, RERANK, TEI_RERANK, COHERE_RERANK,
    RANKING, SCORE, CLASSIFY, PREDICT, TOKENIZE, DETOKENIZE, DECODE, VERTEX,
)  # fmt: skip
# Not these, which say what an answer is of: clients of several servers send them under two names.
_INPUTS = frozenset(
    {
        "data", "data_1", "data_2", "documents", "ids", "input", "inputs", "instances", "items", "model", "parameters",
        "passages", "prompt", "queries", "query", "text", "text_1", "text_2", "texts", "tokens",
    }
)  # fmt: skip


def _complete() -> None:
    """Refuse fields that change the answers of other routes, unless this route defines them."""
    elsewhere: dict[str, KnownField] = {}
    for table in _TABLES:
        for name, field in table.items():
            if name in _INPUTS or field.verdict is HARMLESS:
                continue
            same = elsewhere.get(name, field)
            unless = [*same.unless, *(value for value in field.unless if value not in same.unless)]
            if name.startswith("return_"):
                unless.append(False)
            elsewhere[name] = KnownField(REFUSED, same.apis, ELSEWHERE, tuple(unless))
    for table in _TABLES:
        table.update({name: field for name, field in elsewhere.items() if name not in table})


_complete()
