"""NVIDIA's protocol of reranking; its embeddings are OpenAI's with more fields."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field

from embert.engine.tokenization.encoded import TokenizeOptions
from embert.server.protocols.fields import FIELDS
from embert.server.protocols.openai import Usage
from embert.server.protocols.ranking import Document, documents_texts, join_rows, rank
from embert.server.protocols.request_context import JSON, RequestContext
from embert.server.request.request_body import FAIL_FAST, InputForm, InputForms, RequestBody


class RankingRequest(RequestBody):
    """`POST /v1/ranking`."""

    known = FIELDS["ranking"]
    text_limit: ClassVar[str] = "max_client_documents"
    strings_per_text: ClassVar[int] = 16  # of an object with several fields
    input_forms: ClassVar[InputForms] = {
        "query": InputForm("an object with a string `text`", shortest=0),
        "passages": InputForm("a list of objects with a string `text`", shortest=0),
    }

    query: Document = Field(description="Text that the passages are compared with.")
    passages: Annotated[list[Document], FAIL_FAST] = Field(description="Passages to rank.")
    model: str | None = Field(None, description="The served model's name or id.")
    truncate: Literal["NONE", "END"] | None = Field(
        None, description="END: cut pairs that are too long; NONE: they are an error. Default: --auto-truncate."
    )
    top_n: int | None = Field(None, ge=0, description="An extension: return only the best; 0 or null: all.")


class RankedPassage(BaseModel):
    """Index of a passage in the request, and its logit."""

    index: int
    logit: float


class NvidiaRanking(BaseModel):
    """Response of `/v1/ranking`: the passages, best first."""

    rankings: list[RankedPassage]
    usage: Usage


async def ranking(context: RequestContext) -> tuple[bytes, bytes]:
    request = await context.parse(RankingRequest)
    context.choose(request.model)
    result = await rank(
        context,
        request.query.text,
        documents_texts(request.passages),
        top_n=request.top_n,
        raw=True,
        options=TokenizeOptions(
            truncate=None if request.truncate is None else request.truncate == "END",
            param="query",
            second_param="passages",
        ),
    )
    rows = await join_rows(b'{"index":%d,"logit":%b}' % row for row in zip(result.indices, result.scores, strict=True))
    usage = b'"usage":{"prompt_tokens":%d,"total_tokens":%d}' % (result.tokens, result.tokens)
    return JSON, b'{"rankings":[%b],%b}' % (rows, usage)
