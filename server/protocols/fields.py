"""The fields of every route, by the APIs whose references have them: honored, harmless, ignored or refused.

`RequestBody.known` of each schema is one entry of FIELDS; scripts/generate writes them into docs/api.md. A field that
changes the meaning of a response is honored or refused, never dropped. An ignored field, and one that no API has, is
named in the header `x-embert-ignored-fields`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from embert.server.request.known_fields import Api, KnownField, Verdict

TEI_VECTORS = "embed embed_sparse embed_all"
VECTORS = f"embeddings pooling {TEI_VECTORS} similarity similarity.parameters cohere_embed"
TEI_TEXTS = f"{TEI_VECTORS} similarity.parameters predict"
RERANK = "rerank tei_rerank"
PAIRS = f"{RERANK} score"
SCORES = f"{PAIRS} classify"
# The path chooses the model of these, not a field.
PIPELINES = "token_classify zero_shot"
OLLAMA = "ollama_embed ollama_embeddings ollama_show"
PATH_MODEL = f"{TEI_VECTORS} similarity similarity.parameters predict {PIPELINES} decode vertex"
DECISIONS = "decisions systemone"
OTHERS = f"{PIPELINES} {DECISIONS} tokenize detokenize decode vertex {OLLAMA}"
ALL = f"{VECTORS} {SCORES} cohere_rerank ranking predict {OTHERS}"
_NESTED = ("similarity.inputs", "similarity.parameters", "predict.parameters")  # objects in a body

# Fields by name, for each route and for each object in a body.
FIELDS: dict[str, dict[str, KnownField]] = {route: {} for route in (*ALL.split(), *_NESTED)}


def _add(verdict: Verdict, names: str, routes: str, apis: str, reason: str = "", **more: Any) -> None:
    """A row of the table: fields of which the same is true on several routes; `reason` and `more` are KnownField's."""
    field = KnownField(verdict, tuple(Api[api] for api in apis.split()), reason, **more)
    for route in routes.split():
        FIELDS[route] |= dict.fromkeys(names.split(), field)


_honored = partial(_add, Verdict.HONORED)
_harmless = partial(_add, Verdict.HARMLESS)
_ignored = partial(_add, Verdict.IGNORED)
_refused = partial(_add, Verdict.REFUSED)

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
    """Cohere's and NVIDIA's words for truncation. `side` is the schema's field for the end that is cut off."""
    words: dict[str, dict[str, Any]] = {
        "NONE": {"truncate": False},
        "START": {"truncate": True, side: "left"},
        "END": {"truncate": True, side: "right"},
        "LEFT": {"truncate": True, side: "left"},
        "RIGHT": {"truncate": True, side: "right"},
    }

    def translate(value: Any) -> Mapping[str, Any]:
        return words.get(value.upper(), {"truncate": value}) if isinstance(value, str) else {"truncate": value}

    return translate


def _number_type(value: Any) -> Mapping[str, Any]:
    """Jina's and NVIDIA's `embedding_type`, which has base64 among the types of numbers."""
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    return {"encoding_format": value} if value == "base64" else {"output_dtype": value}


# fmt: off
# --- several kinds of routes ---

_harmless("user", ALL, "OPENAI VLLM INFINITY NVIDIA", "it names the user")
_harmless("request_id", ALL, "VLLM", "the header `x-request-id` names a request")
_harmless("cache_salt", ALL, "VLLM", "no response is kept for other requests")
_harmless("metadata", ALL, "MISTRAL", "a note for the caller's own logs")
_harmless("mm_processor_kwargs media_io_kwargs", ALL, "VLLM", "only images are read with them")
_harmless("options", ALL, "HUGGING_FACE", "about waiting for a model, and a cache, that are not here")
_refused("messages chat_template chat_template_kwargs tools", ALL, "VLLM",
    "texts are read as they are, and not as chats")
_refused("add_generation_prompt continue_final_message", ALL, "VLLM", "texts are not read as chats", unless=(False,))
_refused("padding", ALL, "VLLM", "nothing is padded", unless=("do_not_pad",))
_refused("modality", ALL, "INFINITY NVIDIA", "models read texts only", unless=("text",))
_refused("image images", ALL, "JINA COHERE", "models read texts only", unless=([],))
_refused("add_special_tokens", f"{VECTORS} {SCORES}", "VLLM", "the model reads the first of them", unless=(True,))
_honored("model", "embeddings pooling cohere_embed rerank cohere_rerank ranking score classify detokenize",
    "OPENAI VLLM INFINITY JINA VOYAGE MISTRAL COHERE NVIDIA")
_honored("priority", "embeddings pooling cohere_embed rerank tei_rerank cohere_rerank score classify", "VLLM COHERE")
_honored("truncation", f"embeddings {TEI_TEXTS} {RERANK}", "VOYAGE", **_as("truncate"))
_refused("late_chunking", VECTORS, "JINA", "texts are encoded independently", unless=(False,))
_refused("return_multivector", VECTORS, "JINA", "`embedding_types` asks for these", unless=(False,))
_refused("prompt instruction", VECTORS, "XINFERENCE", "`prompt_name` chooses one of the model's own prompts")
_honored("instruction", "embeddings", "XINFERENCE EMBERT")
_harmless("model", PATH_MODEL, "TEI HUGGING_FACE", "the path chooses the model on TEI's routes")
_harmless("priority", PATH_MODEL, "VLLM COHERE", "the header `x-priority` has this meaning on TEI's routes")
_honored("truncate_prompt_tokens truncation_side", f"embeddings pooling {SCORES}", "VLLM")
_honored("output_dimension", "embeddings pooling embed", "VOYAGE MISTRAL", **_as("dimensions"))
_honored("normalized", "embeddings embed", "JINA", **_as("normalize"))
_honored("use_activation", "embeddings embed", "VLLM", **_as("normalize"))

# --- embeddings ---

_honored("input encoding_format", "embeddings", "OPENAI VLLM TEI INFINITY JINA VOYAGE MISTRAL NVIDIA")
_honored("dimensions", "embeddings", "OPENAI VLLM TEI INFINITY JINA NVIDIA")
_honored("truncate", "embeddings", "JINA NVIDIA EMBERT", translation=_cuts("truncation_side"))
_honored("truncation_direction", "embeddings rerank", "EMBERT", **_as("truncation_side"))
_honored("prompt_name normalize embedding_types", "embeddings", "EMBERT")
_honored("task", "embeddings", "JINA")
_honored("input_type", "embeddings", "VOYAGE NVIDIA EMBERT")
_honored("output_dtype", "embeddings", "VOYAGE MISTRAL")
_honored("embedding_type encoding_type", "embeddings", "JINA NVIDIA", "as `output_dtype`; base64: as `encoding_format`",
    translation=_number_type)
_refused("embed_dtype", "embeddings", "VLLM", "numbers are float32 here, others in /pooling", unless=("float32",))
_refused("endianness", f"embeddings pooling {TEI_VECTORS}", "VLLM", "numbers are little-endian",
    unless=("native", "little"))
_honored("use_activation", f"pooling {SCORES}", "VLLM")
_honored("input_type", "pooling embed_all", "EMBERT")
_honored("input encoding_format dimensions task embed_dtype", "pooling", "VLLM")
_refused("normalize activation softmax", "pooling", "VLLM", "they are older names of `use_activation`")
_refused("data", "pooling", "VLLM", "no plug-in reads it; texts go into `input`")
_honored("truncate", TEI_TEXTS, "TEI", translation=_cuts("truncation_direction"))
_honored("truncation_direction", f"{TEI_TEXTS} tei_rerank", "TEI")
_honored("truncation_side", TEI_TEXTS, "VLLM", **_as("truncation_direction"))
_honored("parameters", TEI_VECTORS, "HUGGING_FACE", "its fields count as the request's own", is_flat=True)
_honored("inputs", f"{TEI_VECTORS} tokenize", "TEI")
_honored("prompt_name", f"{TEI_VECTORS} similarity.parameters tokenize", "TEI")
_honored("task", f"{TEI_VECTORS} similarity.parameters", "EMBERT")
_honored("dimensions normalize", "embed", "TEI")
_refused("truncate_prompt_tokens", f"{TEI_VECTORS} similarity.parameters", "VLLM",
    "/v1/embeddings and /pooling have it")
_refused("encoding_format", TEI_VECTORS, "OPENAI", "numbers are JSON here; /v1/embeddings has base64",
    unless=("float",))
_refused("output_dtype embedding_type", TEI_VECTORS, "VOYAGE MISTRAL JINA", "/v1/embeddings has it", unless=("float",))
_refused("embedding_types", TEI_VECTORS, "COHERE EMBERT", "/v1/embeddings and /v2/embed have it")
_refused("embed_dtype", TEI_VECTORS, "VLLM", "/pooling has it", unless=("float32",))
_refused("input_type", "embed embed_sparse", "VOYAGE NVIDIA COHERE", "`prompt_name` chooses one of the model's prompts")
_refused("dimensions output_dimension", "embed_sparse embed_all", "OPENAI VOYAGE MISTRAL",
    "these vectors have no dimensions to cut off")
_refused("normalize normalized use_activation", "embed_sparse embed_all", "TEI JINA VLLM",
    "these vectors are not scaled", unless=(False,))
_honored("inputs", "similarity predict", "TEI HUGGING_FACE")
_honored("parameters", "similarity", "TEI HUGGING_FACE")
_refused("truncate truncation_direction prompt_name task", "similarity", "TEI", "it belongs into `parameters`")
_refused("input_type", "similarity", "VOYAGE NVIDIA COHERE", "other routes have it", unless=("sentence-similarity",))
_honored("source_sentence sentences", "similarity.inputs", "TEI HUGGING_FACE")
_refused("normalize normalized", "similarity.parameters", "TEI JINA", "cosines do not depend on it",
    unless=(True, False))
_refused("dimensions output_dimension", "similarity.parameters", "OPENAI", "cosines are of whole vectors")
_honored("texts inputs input_type embedding_types max_tokens output_dimension truncate", "cohere_embed", "COHERE")
_honored("dimensions", "cohere_embed", "OPENAI", **_as("output_dimension"))
_refused("normalize normalized use_activation", "cohere_embed", "TEI JINA VLLM",
    "these vectors have length 1; /embed has others", unless=(True,))
_refused("encoding_format", "cohere_embed", "OPENAI", "`embedding_types` has base64", unless=("float",))
_honored("top_k", f"{RERANK} cohere_rerank ranking", "VOYAGE", **_as("top_n"))
_honored("max_tokens_per_query max_tokens_per_doc", RERANK, "VLLM COHERE")

_honored("model", OLLAMA, "OLLAMA")
_honored("input truncate dimensions", "ollama_embed", "OLLAMA")
_honored("prompt", "ollama_embeddings", "OLLAMA")
_honored("name", "ollama_show", "OLLAMA", **_as("model"))
_ignored("keep_alive", OLLAMA, "OLLAMA", "models stay until the server ends")
_ignored("options", OLLAMA, "OLLAMA", "the server's own options say how a model runs")
_ignored("verbose system template", "ollama_show", "OLLAMA", "the response has neither tensors nor templates")
_refused("prompt inputs text texts", "ollama_embed", "OLLAMA TEI COHERE", "`input` has the texts")
_refused("input inputs text", "ollama_embeddings", "OLLAMA TEI", "`prompt` has the text; /api/embed has `input`")

# --- scores ---

_honored("query", RERANK, "VLLM TEI INFINITY JINA VOYAGE COHERE")
_honored("documents", "rerank", "VLLM INFINITY JINA VOYAGE COHERE")
_honored("top_n", RERANK, "VLLM INFINITY JINA COHERE")
_honored("return_documents", RERANK, "INFINITY JINA VOYAGE COHERE")
_honored("return_text", "rerank", "TEI", **_as("return_documents"))
_honored("raw_scores", RERANK, "TEI INFINITY")
_honored("truncate", "rerank", "NVIDIA EMBERT", translation=_cuts("truncation_side"))
_honored("texts", "rerank", "TEI", **_as("documents"), ignored_with="documents")
_harmless("max_chunks_per_doc overlap_tokens", RERANK, "COHERE XINFERENCE", "a document is one chunk, which may be cut")
_harmless("return_len", RERANK, "XINFERENCE", "`usage` and `meta` have the tokens")
_refused("activation softmax", SCORES, "VLLM", "older names of `use_activation`")
_honored("instruction", PAIRS, "VLLM XINFERENCE")
_refused("rank_fields", RERANK, "COHERE", "no other field of a document is read", unless=(["text"],))
_honored("model documents", "tei_rerank", "VLLM INFINITY JINA", ignored_with="texts")
_honored("return_text texts", "tei_rerank", "TEI")
_honored("truncate", "tei_rerank", "TEI NVIDIA", translation=_cuts("truncation_direction"))
_honored("query documents top_n max_tokens_per_doc return_documents", "cohere_rerank", "COHERE")
_harmless("max_chunks_per_doc", "cohere_rerank", "COHERE", "a document is one chunk, which may be cut")
_refused("relevant_spans", "cohere_rerank", "COHERE", "documents have scores as a whole",
    unless=({"mode": "disabled"},))
_refused("rank_fields", "cohere_rerank", "COHERE", "a document is a string", unless=(["text"],))
_refused("raw_scores", "cohere_rerank", "TEI INFINITY", "/v1/rerank has it", unless=(False,))
_refused("use_activation", "cohere_rerank", "VLLM", "/v1/rerank has it", unless=(True,))
_refused("truncation truncate", "cohere_rerank", "VOYAGE NVIDIA", "/v1/rerank has it", unless=(True, "END"))
_refused("truncate_prompt_tokens max_tokens_per_query", "cohere_rerank", "VLLM", "/v1/rerank has it")
_refused("truncation_side", "cohere_rerank", "VLLM", "/v1/rerank has it", unless=("right",))
_honored("instruction", "cohere_rerank", "VLLM")
_honored("query passages truncate", "ranking", "NVIDIA")
_honored("top_n", "ranking", "EMBERT")
_honored("raw_scores", "score classify", "INFINITY", **_not("use_activation"))
_honored("max_tokens_per_query max_tokens_per_doc queries documents items text_1 text_2 data_1 data_2", "score", "VLLM")

# --- classes ---

_honored("input", "classify", "VLLM INFINITY")
_refused("labels classifier_id", "classify", "JINA", "the model has its labels")
_honored("raw_scores", "predict", "TEI")
_honored("parameters", "predict", "HUGGING_FACE")
_honored("use_activation", "predict", "VLLM", **_not("raw_scores"))
_refused("function_to_apply top_k", "predict", "HUGGING_FACE", "it belongs into `parameters`")
_refused("truncate_prompt_tokens", "predict", "VLLM", "/classify has it")
_honored("function_to_apply top_k", "predict.parameters", "HUGGING_FACE")
_harmless("padding", "predict.parameters", "HUGGING_FACE", "nothing is padded")
_refused("return_all_scores", "predict.parameters", "HUGGING_FACE", "`top_k` is the number of labels in the response",
    unless=(True,))
_refused("truncation", "predict.parameters", "HUGGING_FACE", "`truncate`, next to `parameters`, has this meaning",
    unless=(True,))
_refused("max_length", "predict.parameters", "HUGGING_FACE", "texts are cut to what the model takes")

# --- entities and zero-shot classes ---

_honored("inputs", PIPELINES, "HUGGING_FACE")
_honored("parameters", PIPELINES, "HUGGING_FACE", "its fields count as the request's own", is_flat=True)
_honored("aggregation_strategy ignore_labels stride", "token_classify", "HUGGING_FACE")
_honored("candidate_labels hypothesis_template multi_label", "zero_shot", "HUGGING_FACE")
_honored("truncate", PIPELINES, "TEI", translation=_cuts("truncation_direction"))
_honored("truncation_direction", PIPELINES, "TEI")
_refused("truncate_prompt_tokens", PIPELINES, "VLLM", "/pooling has it")
_refused("prompt_name", PIPELINES, "TEI", "entities are characters of the text itself, and hypotheses follow it")
_refused("is_split_into_words", PIPELINES, "HUGGING_FACE", "a text is one string", unless=(False,))
_refused("offset_mapping delimiter", PIPELINES, "HUGGING_FACE", "the tokenizer says where tokens are")
_refused("grouped_entities ignore_subwords", PIPELINES, "HUGGING_FACE", "older names of `aggregation_strategy`")

# --- decisions ---

_honored("input questions", "decisions", "OPENAI VLLM")
_honored("state questions", "systemone", "TYPESAFE VLLM")
_honored("label_mass", DECISIONS, "EMBERT")
_honored("model", DECISIONS, "OPENAI TYPESAFE VLLM")
_harmless("safety_identifier", "decisions", "OPENAI VLLM", "it names the user")
_harmless("prompt_cache_key prompt_cache_options", "decisions", "OPENAI", "no response is kept for other requests")
_refused("images assets audio videos", DECISIONS, "TYPESAFE", "models read texts only", unless=([], {}))
_refused("stream", DECISIONS, "OPENAI", "a response comes as a whole", unless=(False,))
_refused("instructions", DECISIONS, "VLLM", "each question has its own")
_refused("chat_template_kwargs", DECISIONS, "VLLM", "thinking is off", unless=({}, {"enable_thinking": False}))

# --- tokens ---

_honored("add_special_tokens", "tokenize", "TEI VLLM")
_honored("prompt return_token_strs", "tokenize", "VLLM")
_honored("model", "tokenize", "VLLM", ignored_with="inputs")
_honored("tokens", "detokenize", "VLLM")
_honored("ids skip_special_tokens", "decode", "TEI")
_honored("instances", "vertex", "TEI")
_refused("parameters", "vertex", "HUGGING_FACE", "each instance has its own fields", unless=({},))

# fmt: on
# --- on other routes ---

ELSEWHERE = "other routes have it, and this one does not read it"
# Except for those that change the kind of response: clients of several servers send them under two names.
_INPUTS = frozenset(
    {
        "data", "data_1", "data_2", "documents", "ids", "input", "inputs", "instances", "items", "model", "parameters",
        "name", "passages", "prompt", "queries", "query", "questions", "state", "text", "text_1", "text_2",
        "texts", "tokens",
    }
)  # fmt: skip


def _complete() -> None:
    """Refuses fields that change the responses of other routes, unless this route defines them."""
    tables = [table for route, table in FIELDS.items() if route not in _NESTED]
    elsewhere: dict[str, KnownField] = {}
    for table in tables:
        for name, field in table.items():
            if name in _INPUTS or field.verdict in (Verdict.HARMLESS, Verdict.IGNORED):
                continue
            same = elsewhere.get(name, field)
            unless = [*same.unless, *(value for value in field.unless if value not in same.unless)]
            if name.startswith("return_"):
                unless.append(False)
            elsewhere[name] = KnownField(Verdict.REFUSED, same.apis, ELSEWHERE, tuple(unless))
    for table in tables:
        table.update({name: field for name, field in elsewhere.items() if name not in table})


_complete()
