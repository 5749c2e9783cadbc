"""Cohere's dialect, the second version of its API."""

from __future__ import annotations

import uuid
from typing import ClassVar

from pydantic import BaseModel, Field

from embert.engine.tokenization.pairs import PairLimits
from embert.server.api.dialects.fields import COHERE_RERANK
from embert.server.api.dialects.ranking import joined, rank
from embert.server.api.dialects.rerank import RerankMeta, RerankResult, result_rows, search_units
from embert.server.api.input.request_body import InputForm, InputForms, RequestBody, TextList
from embert.server.api.request_context import JSON, RequestContext

__all__ = ["CohereError", "CohereRanking", "CohereRerankRequest", "rerank"]

_DOCUMENT_TOKENS = 4096  # of a document, unless the request says otherwise


class CohereError(BaseModel):
    """Cohere's error."""

    id: str
    message: str


class CohereRerankRequest(RequestBody):
    """`POST /v2/rerank`."""

    known = COHERE_RERANK
    text_limit: ClassVar[str] = "max_client_documents"
    input_forms: ClassVar[InputForms] = {
        "query": InputForm(shortest=0),
        "documents": InputForm("a list of strings", shortest=0),
    }

    model: str | None = Field(None, description="The served model's name or id.")
    query: str = Field(description="What the documents are compared with.")
    documents: TextList
    top_n: int | None = Field(None, ge=1, description="Answer only the best. More than there are, or null: all.")
    max_tokens_per_doc: int | None = Field(
        None, ge=1, description="Cut documents to this many tokens. Default, and null: 4096."
    )
    priority: int | None = Field(None, ge=0, le=999, description="Above 0: as `X-Priority: bulk`.")
    return_documents: bool | None = Field(
        None, description="An extension, which litellm sends: answer the documents' texts too. Default: false."
    )


class CohereRanking(BaseModel):
    """Answer of `/v2/rerank`."""

    id: str
    results: list[RerankResult]
    meta: RerankMeta


async def rerank(context: RequestContext) -> tuple[bytes, bytes]:
    """`POST /v2/rerank`."""
    request = await context.parse(CohereRerankRequest)
    context.choose(request.model)
    if request.priority is not None and request.priority > 0:
        context.give_way()
    ranking = await rank(
        context,
        request.query,
        request.documents,
        param="documents",
        top_n=request.top_n,
        raw=False,
        truncate=None,
        limits=PairLimits(second=request.max_tokens_per_doc or _DOCUMENT_TOKENS),
    )
    rows = await joined(result_rows(ranking, request.documents if request.return_documents else None))
    return JSON, (
        b'{"id":"%b","results":[%b],"meta":{"api_version":{"version":"2"},"billed_units":{"search_units":%d},'
        b'"tokens":{"input_tokens":%d,"output_tokens":0}}}'
    ) % (str(uuid.uuid4()).encode(), rows, search_units(len(request.documents)), ranking.tokens)
