"""Entities of texts: transformers' TokenClassificationPipeline on the logits of tokens.

Its steps and their names are the pipeline's: tokens become words, words and tokens of one label become entities, and of
entities that overlap because a long text was read in several sequences the longer one stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from embert.engine.errors import InputError
from embert.engine.heads.scores import scores
from embert.engine.tokenization.encoded import EncodedSpans
from embert.engine.tokenization.tokenizer import Tokenizer

Floats = npt.NDArray[np.float32]
Aggregation = Literal["none", "simple", "first", "average", "max"]
STRATEGIES: tuple[Aggregation, ...] = get_args(Aggregation)
DEFAULT_IGNORED = ("O",)


@dataclass(frozen=True, slots=True)
class Entity:
    """Some characters of a text with a label. Without aggregation they are those of one token."""

    label: str  # without aggregation as the model has it, else without "B-" or "I-"
    score: float
    word: str  # the text of its tokens; the client's own characters are text[start:end]
    start: int
    end: int
    index: int | None = None  # without aggregation: the token's position in its sequence


@dataclass(frozen=True, slots=True)
class EntityOptions:
    """Options that turn tokens into entities, by the pipeline's names."""

    aggregation: Aggregation = "none"
    ignored: Collection[str] = DEFAULT_IGNORED  # labels without an entity
    stride: int | None = None  # tokens that the sequences of a long text share; None: a long text is cut

    def check(self) -> None:
        """Raise InputError for a stride without aggregation, which would return shared tokens twice."""
        if self.stride is not None and self.aggregation == "none":
            raise InputError(
                "needs an `aggregation_strategy` of simple, first, average or max; it is none", param="stride"
            )


class _Span(NamedTuple):
    """A token or a word of a text."""

    label: int
    score: float
    words: tuple[str, ...]  # of the vocabulary
    start: int
    end: int
    position: int  # of its first token in the sequence


def entities_of(
    texts: Sequence[str],
    spans: EncodedSpans,
    logits: Sequence[Floats],
    labels: Sequence[str],
    tokenizer: Tokenizer,
    options: EntityOptions,
) -> Iterator[list[Entity] | None]:
    """The entities of each text, and None between sequences of one, where a caller may stop.

    `logits` are float32 [tokens, labels] of each sequence.
    """
    rows, first = iter(logits), 0
    lengths = iter(spans.encoded.lengths.tolist())
    for text, windows in zip(texts, spans.windows.tolist(), strict=True):
        entities: list[Entity] = []
        for number in range(windows):
            if number:
                yield None
            last = first + next(lengths)
            tokens = slice(first, last)
            entities += _of_sequence(text, spans, tokens, scores(next(rows), "softmax"), labels, tokenizer, options)
            first = last
        yield _without_overlaps(entities) if windows > 1 else entities


def _of_sequence(
    text: str,
    spans: EncodedSpans,
    tokens: slice,
    probabilities: Floats,
    labels: Sequence[str],
    tokenizer: Tokenizer,
    options: EntityOptions,
) -> list[Entity]:
    starts, stops = spans.starts[tokens].tolist(), spans.stops[tokens].tolist()
    best = probabilities.argmax(1)
    if options.aggregation == "none":
        ignored = [label in options.ignored for label in labels]
        positions = [
            position for position, label in enumerate(best.tolist()) if starts[position] >= 0 and not ignored[label]
        ]
    else:
        positions = [position for position, start in enumerate(starts) if start >= 0]
    ids = spans.encoded.ids[tokens][positions].tolist()
    words = tokenizer.words(ids)
    for number, (index, token_id) in enumerate(zip(positions, ids, strict=True)):
        if token_id == tokenizer.unknown_id:
            words[number] = text[starts[index] : stops[index]]
    found = probabilities[positions, best[positions]].tolist()
    rows = zip(best[positions].tolist(), found, words, positions, strict=True)
    of_tokens = [_Span(label, score, (word,), starts[i], stops[i], i) for label, score, word, i in rows]
    if options.aggregation == "none":
        return [
            Entity(labels[span.label], span.score, span.words[0], span.start, span.end, span.position)
            for span in of_tokens
        ]
    if options.aggregation != "simple":
        continues = _continues(text, of_tokens, ids, tokenizer)
        of_tokens = [
            _word(group, probabilities, tokenizer, options.aggregation) for group in _group(of_tokens, continues)
        ]
    return [*_entities(of_tokens, labels, tokenizer, options.ignored)]


def _continues(text: str, tokens: Sequence[_Span], ids: Sequence[int], tokenizer: Tokenizer) -> Iterator[bool]:
    """Mask of the tokens that belong to the word before them."""
    for token, token_id in zip(tokens, ids, strict=True):
        if token_id == tokenizer.unknown_id:
            yield False
        elif tokenizer.has_subwords:
            yield len(token.words[0]) != token.end - token.start
        else:
            yield token.start > 0 and " " not in text[token.start - 1 : token.start + 1]


def _group(tokens: Sequence[_Span], continues: Iterator[bool]) -> list[list[_Span]]:
    words: list[list[_Span]] = []
    for token, is_subword in zip(tokens, continues, strict=True):
        if words and is_subword:
            words[-1].append(token)
        else:
            words.append([token])
    return words


def _word(tokens: Sequence[_Span], probabilities: Floats, tokenizer: Tokenizer, aggregation: Aggregation) -> _Span:
    """The tokens of a word, with one label."""
    if aggregation == "average":
        averages = probabilities[[token.position for token in tokens]].mean(0)
        label = int(averages.argmax())
        score = float(averages[label])
    else:
        source = tokens[0] if aggregation == "first" else max(tokens, key=lambda token: token.score)
        label, score = source.label, source.score
    word = tokenizer.join([token.words[0] for token in tokens])
    return _Span(label, score, (word,), tokens[0].start, tokens[-1].end, tokens[0].position)


def _entities(
    spans: Sequence[_Span], labels: Sequence[str], tokenizer: Tokenizer, ignored: Collection[str]
) -> Iterator[Entity]:
    """Neighbors of one label as entities. A label that begins with "B-" begins an entity."""
    begins = [label.startswith("B-") for label in labels]
    tags = [label[2:] if label.startswith(("B-", "I-")) else label for label in labels]
    groups: list[list[_Span]] = []
    for span in spans:
        if groups and tags[span.label] == tags[groups[-1][-1].label] and not begins[span.label]:
            groups[-1].append(span)
        else:
            groups.append([span])
    for group in groups:
        label = labels[group[0].label].split("-", 1)[-1]
        if label in ignored:
            continue
        score = float(np.mean([span.score for span in group], dtype=np.float32))
        word = tokenizer.join([word for span in group for word in span.words])
        yield Entity(label, score, word, group[0].start, group[-1].end)


def _without_overlaps(entities: list[Entity]) -> list[Entity]:
    """Keep the longer one of neighbors that overlap, or the one with the larger score."""
    if not entities:
        return []
    result: list[Entity] = []
    ordered = sorted(entities, key=lambda entity: entity.start)
    previous = ordered[0]
    for entity in ordered:
        if not previous.start <= entity.start < previous.end:
            result.append(previous)
            previous = entity
        elif (entity.end - entity.start, entity.score) > (previous.end - previous.start, previous.score):
            previous = entity
    return [*result, previous]
