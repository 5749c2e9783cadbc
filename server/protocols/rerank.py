"""Reranking as Cohere's v1, Jina, vLLM, Infinity and Voyage have it: one request, and one response for all clients;
and as NVIDIA has it.

Where they differ: Voyage's clients read `data`, whose documents are strings, in place of `results`, whose documents are
objects. Infinity's documents are strings in `results`, which clients of the others could not read.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

import orjson
from pydantic import BaseModel, Field

from embert.engine.tokenization.encoded import TokenizeOptions
from embert.server.protocols.fields import FIELDS
from embert.server.protocols.openai import Usage
from embert.server.protocols.ranking import DOCUMENTS, Document, Documents, Ranking, documents_texts, join_rows, rank
from embert.server.protocols.request_context import JSON, RequestContext
from embert.server.protocols.serialization import join
from embert.server.request.request_body import FAIL_FAST, Direction, InputForm, InputForms, RequestBody

INSTRUCTION = "What makes a document relevant, for models that take an instruction. Default: the model's own."

_VOYAGE = frozenset(("top_k", "truncation"))  # fields of Voyage's clients
# Fields of Infinity's client, which reads no other `object` than "rerank"; Voyage's and Jina's is "list".
_INFINITY = frozenset(("top_n", "raw_scores"))


class PairFields(RequestBody):
    """vLLM's fields of pairs: the tokens that are read, and the function that turns logits into scores."""

    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        description="Cut a pair to this many tokens, special ones included; -1: to the model's limit. "
        "Default: the server's --auto-truncate.",
    )
    truncation_side: Direction | None = Field(None, description="The end of a text that is cut off. Default: right.")
    max_tokens_per_query: int | None = Field(None, ge=0, description="Cut the query to this many tokens; 0: no limit.")
    max_tokens_per_doc: int | None = Field(None, ge=0, description="Cut documents to this many tokens; 0: no limit.")
    use_activation: bool | None = Field(None, description="false: scores are the model's logits.")
    instruction: str | None = Field(None, description=INSTRUCTION)
    priority: int | None = Field(None, description="Above 0: as `X-Priority: bulk`.")

    @property
    def cuts(self) -> bool | None:
        """Truncate pairs that exceed the limit. None uses the server's default."""
        wanted = (self.truncate_prompt_tokens, self.max_tokens_per_query, self.max_tokens_per_doc)
        return True if any(option is not None for option in wanted) else None

    def tokenize_options(
        self, truncate: bool | None, direction: Direction | None, params: tuple[str, str]
    ) -> TokenizeOptions:
        """Options for the tokenizer. `params` are the fields of the texts."""
        limit = self.truncate_prompt_tokens
        return TokenizeOptions(
            truncate=truncate,
            direction=direction,
            limit=None if limit is None or limit < 0 else limit,
            first_limit=self.max_tokens_per_query or None,
            second_limit=self.max_tokens_per_doc or None,
            param=params[0],
            second_param=params[1],
            instruction=self.instruction,
        )


class RerankFields(PairFields):
    """All fields except the documents."""

    text_limit: ClassVar[str] = "max_client_documents"
    strings_per_text: ClassVar[int] = 16  # of an object with several fields

    model: str | None = Field(None, description="The served model's name or id.")
    query: str = Field(description="Text that the documents are compared with.")
    top_n: int | None = Field(None, ge=0, description="Return only the best; 0 or null: all. More than there are: all.")
    return_documents: bool | None = Field(None, description="Return the documents' texts too. Default: false.")
    raw_scores: bool | None = Field(None, description="true: scores are the model's logits. Default: false.")
    truncate: bool | None = Field(
        None, description="Cut pairs that are too long. Default: the server's --auto-truncate."
    )


class RerankDocumentsRequest(RerankFields):
    """`POST /v1/rerank`."""

    known = FIELDS["rerank"]
    input_forms: ClassVar[InputForms] = {"query": InputForm(shortest=0), "documents": DOCUMENTS}

    documents: Documents = Field(description="Texts, or objects with a `text`, whose other fields are ignored.")


class RerankedDocument(BaseModel):
    """A document, unchanged."""

    text: str


class RerankResult(BaseModel):
    """Index of a document in the request, and its score."""

    index: int
    relevance_score: float
    document: RerankedDocument | None = None


class VoyageResult(BaseModel):
    """A document's score in the form of Voyage."""

    relevance_score: float
    index: int
    document: str | None = None


class RerankUsage(BaseModel):
    """Tokens read: those of the query count once for each document."""

    prompt_tokens: int
    total_tokens: int


class ApiVersion(BaseModel):
    """Cohere API version that the response has."""

    version: str


class TokenCounts(BaseModel):
    """Numbers of tokens read and written."""

    input_tokens: int
    output_tokens: int


class CohereMeta(BaseModel):
    """Metadata of Cohere's responses."""

    api_version: ApiVersion
    tokens: TokenCounts


class Reranked(BaseModel):
    """Response of `/v1/rerank`."""

    id: str
    object: Literal["rerank", "list"]
    model: str
    results: list[RerankResult]
    data: list[VoyageResult]
    usage: RerankUsage
    meta: CohereMeta


async def rerank(context: RequestContext) -> tuple[bytes, bytes]:
    request = await context.parse(RerankDocumentsRequest)
    return await rerank_documents(context, request, request.documents, request.truncation_side)


async def rerank_documents(
    context: RequestContext, request: RerankFields, documents: Documents, direction: Direction | None
) -> tuple[bytes, bytes]:
    handle = context.choose(request.model, priority=request.priority)
    texts = documents_texts(documents)
    if request.return_documents:
        context.hold(2 * sum(map(len, texts)), "the response")
    ranking = await rank_texts(context, request, texts, "documents", direction)
    data = rows = await join_rows(result_rows(ranking, texts if request.return_documents else None))
    if request.return_documents:
        data = await join_rows(_voyage_rows(ranking, texts))
    tokens = ranking.tokens
    is_voyage = _VOYAGE.intersection(context.names.values()) or _INFINITY.isdisjoint(request.model_fields_set)
    kind = b"list" if is_voyage else b"rerank"
    name = orjson.dumps(handle.name)
    head = b'{"id":"%b","object":"%b","model":%b,"results":[' % (str(uuid.uuid4()).encode(), kind, name)
    usage = b'{"prompt_tokens":%d,"total_tokens":%d}' % (tokens, tokens)
    tail = b'],"usage":%b,"meta":%b}' % (usage, cohere_meta(b"1", tokens))
    return JSON, await join([head, rows, b'],"data":[', data, tail])


async def rank_texts(
    context: RequestContext,
    request: RerankFields,
    texts: list[str],
    param: str,
    direction: Direction | None,
) -> Ranking:
    """The texts of field `param` by their relevance."""
    return await rank(
        context,
        request.query,
        texts,
        top_n=request.top_n,
        raw=bool(request.raw_scores) or request.use_activation is False,
        options=request.tokenize_options(
            request.cuts if request.truncate is None else request.truncate, direction, ("query", param)
        ),
    )


def result_rows(ranking: Ranking, texts: list[str] | None) -> Iterator[bytes]:
    """The JSON of each result, with its text where `texts` are given."""
    for index, score in zip(ranking.indices, ranking.scores, strict=True):
        document = b"" if texts is None else b',"document":{"text":%b}' % orjson.dumps(texts[index])
        yield b'{"index":%d,"relevance_score":%b%b}' % (index, score, document)


def _voyage_rows(ranking: Ranking, texts: list[str]) -> Iterator[bytes]:
    for index, score in zip(ranking.indices, ranking.scores, strict=True):
        yield b'{"relevance_score":%b,"index":%d,"document":%b}' % (score, index, orjson.dumps(texts[index]))


def cohere_meta(version: bytes, tokens: int) -> bytes:
    return b'{"api_version":{"version":"%b"},"tokens":{"input_tokens":%d,"output_tokens":0}}' % (version, tokens)


# --- NVIDIA ---


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
