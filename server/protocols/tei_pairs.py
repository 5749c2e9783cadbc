"""text-embeddings-inference's routes of pairs and classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, cast

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import BaseModel, Field, RootModel

from embert.engine import Task
from embert.engine.heads.description import Classifier
from embert.engine.heads.scores import scores
from embert.engine.tokenization.encoded import TokenizeOptions
from embert.server.http.errors import EmptyInput, Invalid
from embert.server.protocols.fields import FIELDS
from embert.server.protocols.ranking import DOCUMENTS, Documents, activation, join_rows, json_numbers
from embert.server.protocols.request_context import JSON, RequestContext
from embert.server.protocols.rerank import Reranked, RerankFields, rank_texts, rerank_documents
from embert.server.protocols.serialization import join
from embert.server.registry.tokenizing import TextPairs
from embert.server.request.request_body import (
    MODELS_DIRECTION,
    Direction,
    InputForm,
    InputForms,
    RequestBody,
    RequestObject,
    TextList,
    TextLists,
)

# --- rerank ---


class RerankRequest(RerankFields):
    """`POST /rerank`: with `texts` TEI's, else with `documents` that of `/v1/rerank`."""

    known = FIELDS["tei_rerank"]
    input_forms: ClassVar[InputForms] = {
        "query": InputForm(shortest=0),
        "texts": InputForm("a list of strings", shortest=0),
        "documents": DOCUMENTS,
    }

    texts: TextList | None = Field(None, description="Texts to rank. The response has TEI's form.")
    documents: Documents | None = Field(
        None, description="Texts to rank. The response is that of `/v1/rerank`. Ignored if there are `texts`."
    )
    truncation_direction: Direction = Field(
        MODELS_DIRECTION, description="The end of a text that is cut off. Default: right."
    )
    return_text: bool = Field(False, description="Return the texts too.")


class Rank(BaseModel):
    """Index of a text in the request, and its score."""

    index: int
    score: float
    text: str | None = None


class Ranks(RootModel[list[Rank] | Reranked]):
    """The texts, best first, or the response of `/v1/rerank`."""


async def rerank(context: RequestContext) -> tuple[bytes, bytes]:
    request = await context.parse(RerankRequest)
    direction = request.truncation_side or request.truncation_direction
    texts, documents = request.texts, request.documents
    if texts is None:
        if documents is None:
            raise Invalid("is required, or `documents` in its place; the request has neither", "texts")
        return await rerank_documents(context, request, documents, direction)
    context.choose(None, priority=request.priority)  # TEI's routes do not read `model`
    ranking = await rank_texts(context, request, texts, "texts", direction)
    rows = zip(ranking.indices, ranking.scores, strict=True)
    if request.return_text or request.return_documents:
        results = (
            b'{"index":%d,"text":%b,"score":%b}' % (index, orjson.dumps(texts[index]), score) for index, score in rows
        )
    else:
        results = (b'{"index":%d,"score":%b}' % row for row in rows)
    return JSON, await join([b"[", await join_rows(results), b"]"])


# --- predict ---

_INPUTS = InputForm("a text, a pair [first, second], or a list of lists of one or two texts", together=2)
_FUNCTIONS = {"sigmoid": "sigmoid", "softmax": "softmax", "none": "identity"}


class PredictParameters(RequestObject):
    """Parameters that huggingface_hub's `text_classification` sends next to the text."""

    known = FIELDS["predict.parameters"]
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = Field(
        None, description="Function that turns logits into scores. Default: as without parameters."
    )
    top_k: int | None = Field(None, ge=1, description="Return only the best labels.")


class PredictRequest(RequestBody):
    """`POST /predict`: the labels of texts, or of pairs of texts."""

    known = FIELDS["predict"]
    strings_per_text: ClassVar[int] = 2
    input_forms: ClassVar[InputForms] = {"inputs": _INPUTS}

    inputs: str | TextList | TextLists = Field(description="A text, a pair, or a list of lists of one or two texts.")
    truncate: bool | None = Field(
        None, description="Cut texts that are too long. Default: the server's --auto-truncate."
    )
    truncation_direction: Direction = Field(
        MODELS_DIRECTION, description="The end that is cut off. Default: the model's, mostly right."
    )
    raw_scores: bool = Field(False, description="Return the model's logits.")
    parameters: PredictParameters | None = Field(
        None,
        description="As in Hugging Face's inference API. The response then has a list of lists, even for one text.",
    )


class Prediction(BaseModel):
    """A label and its score."""

    score: float
    label: str


class Predictions(RootModel[list[Prediction] | list[list[Prediction]]]):
    """All labels, best first: of one text, or of each of several."""


async def predict(context: RequestContext) -> tuple[bytes, bytes]:
    handle = context.handle
    request = await context.parse(PredictRequest)
    texts = _pairs(request.inputs)
    handle.limits.check_count(len(texts.seconds), "inputs")
    encoded = await context.tokenize_pairs(
        texts,
        TokenizeOptions(truncate=request.truncate, direction=request.truncation_direction, second_param="inputs"),
    )
    logits = (await context.run(encoded, Task.CLASSIFY)).vectors
    classifier, parameters = handle.classifier, request.parameters
    function = activation(classifier, raw=request.raw_scores)
    if parameters is not None and parameters.function_to_apply is not None:
        function = _FUNCTIONS[parameters.function_to_apply]
    rows = await join_rows(_rows(logits, function, classifier, None if parameters is None else parameters.top_k))
    is_single = isinstance(request.inputs, str) or isinstance(request.inputs[0], str)
    # @huggingface/inference reads a list of lists without parameters, too.
    if is_single and parameters is None and not context.has_agent(b"@huggingface/inference"):
        return JSON, rows
    return JSON, await join([b"[", rows, b"]"])


def _pairs(inputs: str | list[str] | list[list[str]]) -> TextPairs:
    """The texts. Raises Invalid for more than two that belong together, EmptyInput for empty ones."""
    if isinstance(inputs, str):
        inputs = [inputs]
    if not inputs:
        raise EmptyInput("must not be an empty list", "inputs")
    is_batch = not isinstance(inputs[0], str)
    together = cast("list[list[str]]", inputs if is_batch else [inputs])
    for index, texts in enumerate(together):
        path = f"[{index}]" if is_batch else ""
        if texts in ([], [""]):  # a pair may have empty texts, as in TEI
            raise EmptyInput("must not be empty", "inputs", path=path + "[0]" * (is_batch and bool(texts)))
        if len(texts) > 2:
            reason = f"is a list of {len(texts)} texts; a pair has 2, and several texts are a list of lists"
            raise Invalid(reason, "inputs", path=path)
    return TextPairs([texts[0] for texts in together], [texts[1] if len(texts) > 1 else None for texts in together])


def _rows(logits: npt.NDArray[np.float32], function: str, classifier: Classifier, top_k: int | None) -> Iterator[bytes]:
    """A list of labels for each text. Logits give the order: the scores of two may both be 1."""
    labels = [b',"label":%b}' % orjson.dumps(label) for label in classifier.labels]
    for row in logits:
        order = np.argsort(-row, kind="stable")[:top_k]
        numbers = json_numbers(scores(row[None], function)[0, order])
        items = [
            b'{"score":%b%b' % (score, labels[column]) for score, column in zip(numbers, order.tolist(), strict=True)
        ]
        yield b"[%b]" % b",".join(items)
