"""Tokens with their offsets in the text, in chunks, for /tokenize."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from embert.engine.tokenization.backend import Backend, TokenizerFailed
from embert.engine.tokenization.encoded import TokenInfo, check_unicode, groups, untokenizable
from embert.engine.tokenization.split_points import TextParts

__all__ = ["tokens_with_offsets"]

CHUNK_CHARACTERS = 8_192


def tokens_with_offsets(
    backend: Backend, texts: Sequence[str], prompt: str, *, add_special_tokens: bool, param: str, most_unbroken: int
) -> Iterator[list[tuple[int, list[TokenInfo]]]]:
    """Yield the next tokens of some texts in each chunk, each list with the text's index. Nothing is cut.

    `prompt` goes before every text, and offsets count from its first character. Raises InputTooLarge, before the work,
    for a text without a split point for over `most_unbroken` characters, and InputError for a lone surrogate.
    """
    special = backend.special
    texts = [prompt + text for text in texts]
    for group in groups([min(len(text), CHUNK_CHARACTERS) for text in texts], CHUNK_CHARACTERS):
        parts = {
            index: TextParts(
                texts[index], backend.split_points, "right", most_unbroken, index=index, param=param, offsets=True
            )
            for index in range(group.start, group.stop)
        }
        answer = [(index, [*special.before] if add_special_tokens else []) for index in parts]
        while parts:
            try:
                _append_tokens(backend, parts, dict(answer), param)
            except TypeError:
                check_unicode(texts, param)
                raise
            if add_special_tokens:
                for index, tokens in answer:
                    if not parts[index].more:
                        tokens += special.after
            yield answer
            parts = {index: part for index, part in parts.items() if part.more}
            answer = [(index, []) for index in parts]


def _append_tokens(
    backend: Backend, parts: dict[int, TextParts], answer: dict[int, list[TokenInfo]], param: str
) -> None:
    """Append the tokens of the next part of each text."""
    starts = [part.start for part in parts.values()]
    taken = [part.take(CHUNK_CHARACTERS) for part in parts.values()]
    try:
        encodings = backend.encodings([text for _, text in taken])
    except TokenizerFailed:
        for index, (_, text) in zip(parts, taken, strict=True):
            try:
                backend.encodings([text])
            except TokenizerFailed as error:
                raise untokenizable(index, str(error), param) from error
        raise
    for tokens, text_start, (led, text), encoding in zip(answer.values(), starts, taken, encodings, strict=True):
        first = backend.lead_tokens if led else 0
        shift = text_start - (len(backend.split_points.lead) if led else 0)
        tokens += [
            TokenInfo(token_id, text[start:stop], False, start + shift, stop + shift)
            for token_id, (start, stop) in zip(encoding.ids[first:], encoding.offsets[first:], strict=True)
        ]
