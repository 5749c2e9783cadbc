"""Default requests of clients, from their public sources, are served, and no field is ignored."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.live import Live

NAME = "sentence-transformers/all-MiniLM-L6-v2"
A, B = "a cat", "a kitten"
EMBEDDINGS: dict[str, Any] = {"input": [A, B], "model": NAME}
DOCUMENTS: dict[str, Any] = {"model": "default/not-specified", "query": A, "documents": [A, B]}
TEXTS: dict[str, Any] = {"query": A, "texts": [A, B]}
NVIDIA: dict[str, Any] = {"model": None, "query": {"text": A}, "passages": [{"text": A}, {"text": B}]}

# client, path, body
EMBEDDERS: list[tuple[str, str, Any]] = [
    ("openai (Python and JavaScript), AnythingLLM, n8n, Vercel AI", "/v1/embeddings",
     EMBEDDINGS | {"encoding_format": "base64"}),
    ("Spring AI, LangChain4j", "/v1/embeddings", EMBEDDINGS | {"encoding_format": "float"}),
    ("Open WebUI, Continue", "/v1/embeddings", EMBEDDINGS),
    ("Dify, OpenAI-compatible", "/v1/embeddings", EMBEDDINGS | {"encoding_format": "float", "user": "abc-123"}),
    ("Dify, text-embeddings-inference", "/v1/embeddings", {"input": [A, B]}),
    ("LangChain, NVIDIAEmbeddings", "/v1/embeddings",
     EMBEDDINGS | {"encoding_format": "float", "input_type": "passage", "truncate": "NONE"}),
    ("LlamaIndex, NVIDIAEmbedding", "/v1/embeddings",
     EMBEDDINGS | {"encoding_format": "float", "input_type": "query", "truncate": "END"}),
    ("Haystack, NvidiaDocumentEmbedder", "/v1/embeddings",
     EMBEDDINGS | {"encoding_format": "float", "input_type": "passage", "truncate": "START", "user": None}),
    ("LlamaIndex, JinaEmbedding", "/v1/embeddings", EMBEDDINGS | {"encoding_type": "float"}),
    ("Chroma, JinaEmbeddingFunction", "/v1/embeddings", EMBEDDINGS | {
        "late_chunking": False, "truncate": True, "embedding_type": "float", "normalized": True}),
    ("voyageai", "/v1/embeddings", EMBEDDINGS | {
        "input_type": None, "truncation": True, "output_dtype": None, "output_dimension": None,
        "encoding_format": "base64"}),
    ("LangChain, VoyageAIEmbeddings", "/v1/embeddings", EMBEDDINGS | {"input_type": "document", "truncation": True}),
    ("mistralai", "/v1/embeddings", EMBEDDINGS | {"output_dimension": None, "metadata": {"a": 1}}),
    ("infinity_client", "/embeddings", EMBEDDINGS | {
        "model": "default/not-specified", "dimensions": 0, "modality": "text", "encoding_format": "float",
        "user": None}),
    ("LiteLLM, hosted_vllm/", "/v1/embeddings", EMBEDDINGS | {"encoding_format": None}),
    ("vLLM's examples", "/v1/embeddings", EMBEDDINGS | {
        "encoding_format": "base64", "embed_dtype": "float32", "endianness": "native", "use_activation": None,
        "truncate_prompt_tokens": -1, "request_id": "r", "priority": 0, "add_special_tokens": True}),
    ("LlamaIndex, TextEmbeddingsInference; Continue", "/embed", {"inputs": [A, B], "truncate": True}),
    ("Haystack, HuggingFaceAPIDocumentEmbedder", "/",
     {"inputs": [A, B], "truncate": True, "normalize": False}),
    ("huggingface_hub, feature_extraction", "/", {"inputs": [A, B], "parameters": {}, "options": {"use_cache": True}}),
    ("huggingface.js, featureExtraction", "/", {"inputs": [A, B]}),
    ("Vertex AI", "/vertex", {"instances": [{"inputs": A}, {"inputs": B}], "parameters": {}}),
    ("cohere, Client.embed", "/v1/embed", {"model": NAME, "texts": [A, B]}),
    ("cohere, ClientV2.embed; LiteLLM, cohere/", "/v2/embed", {
        "model": NAME, "texts": [A, B], "input_type": "search_document", "embedding_types": ["float"]}),
    ("Continue and Haystack, Cohere", "/v1/embed", {
        "model": NAME, "texts": [A, B], "input_type": "search_query", "embedding_types": ["float"], "truncate": "END"}),
    ("Ollama (Python and JavaScript), Continue", "/api/embed", {"model": f"{NAME}:latest", "input": [A, B]}),
    ("LlamaIndex, OllamaEmbedding; Chroma, OllamaEmbeddingFunction", "/api/embed", {"model": NAME, "input": [A, B]}),
    ("Dify, tokenizer of text-embeddings-inference", "/tokenize", {"inputs": [A, B]}),
]  # fmt: skip
RERANKERS: list[tuple[str, str, Any]] = [
    ("RAGFlow, Xinference", "/v1/rerank", DOCUMENTS | {"return_documents": "true", "return_len": "true"}),
    ("RAGFlow, SiliconFlow", "/v1/rerank", DOCUMENTS | {
        "top_n": 2, "return_documents": False, "max_chunks_per_doc": 1024, "overlap_tokens": 80}),
    ("RAGFlow, NVIDIA", "/v1/ranking", NVIDIA | {"truncate": "END", "top_n": 2}),
    ("RAGFlow, Hugging Face; LlamaIndex, TEI", "/rerank", TEXTS | {"raw_scores": False, "truncate": True}),
    ("LangChain, NVIDIARerank", "/v1/ranking", NVIDIA),
    ("LlamaIndex, NVIDIARerank", "/v1/ranking", NVIDIA | {"truncate": "NONE"}),
    ("LangChain, CohereRerank", "/v2/rerank", {
        "query": A, "documents": [A, B], "top_n": 3, "max_tokens_per_doc": None}),
    ("LiteLLM, cohere/", "/v2/rerank", {
        "query": A, "documents": [A, B], "top_n": 2, "rank_fields": None, "return_documents": True,
        "max_chunks_per_doc": None, "max_tokens_per_doc": None}),
    ("Open WebUI, Haystack (Jina), Dify", "/v1/rerank", DOCUMENTS | {"top_n": 2}),
    ("Dify, text-embeddings-inference", "/rerank", TEXTS),
    ("Continue, text-embeddings-inference", "/rerank", TEXTS | {
        "return_text": False, "raw_scores": False, "truncation_direction": "Right"}),
    ("clients of several servers", "/rerank", TEXTS | {
        "model": "reranker", "documents": [A, B], "return_text": False, "return_documents": False}),
    ("voyageai; Continue, Voyage", "/v1/rerank", {
        "query": A, "documents": [A, B], "top_k": None, "truncation": True}),
    ("infinity_client", "/rerank", DOCUMENTS | {"return_documents": False, "raw_scores": False, "top_n": None}),
    ("Vertex AI", "/vertex", {"instances": [TEXTS, {"inputs": [[A, B]]}]}),
    ("TEI at its address", "/", {"inputs": [[A, B], [A, A]]}),
]  # fmt: skip
CLASSIFIERS: list[tuple[str, str, Any]] = [
    ("infinity_client", "/classify", {"input": [A, B], "model": "default/not-specified", "raw_scores": False}),
    ("vLLM's examples", "/v1/classify", {"input": [A, B]}),
    ("huggingface_hub, text_classification", "/", {"inputs": [[A], [B]], "parameters": {}}),
    ("TEI", "/predict", {"inputs": [[A], [B]], "raw_scores": False, "truncate": None}),
]


def count(response: Any) -> int:
    """The results in a response, of whatever API."""
    if isinstance(response, list):
        return len(response)
    names = ("data", "results", "rankings", "predictions", "embeddings")
    found = next(response[name] for name in names if name in response)
    return len(found["float"] if isinstance(found, dict) else found)


CASES = [
    pytest.param(model, path, body, id=f"{model}: {client}")
    for model, rows in (("server", EMBEDDERS), ("reranker", RERANKERS), ("classifier", CLASSIFIERS))
    for client, path, body in rows
]


@pytest.mark.parametrize(("model", "path", "body"), CASES)
def test_default_request(request: pytest.FixtureRequest, model: str, path: str, body: Any) -> None:
    running: Live = request.getfixturevalue(model)
    response = running.post(path, body)
    assert response.status_code == 200, response.text
    assert "x-embert-ignored-fields" not in response.headers
    assert count(response.json()) == 2
