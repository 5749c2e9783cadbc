"""The errors for texts and token ids that cannot be encoded. Each names the request field and the text's index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from embert.engine.errors import InputError, InputTooLarge

__all__ = [
    "bad_id",
    "check_sequence",
    "check_text",
    "check_texts",
    "check_unicode",
    "too_long",
    "unbroken",
    "untokenizable",
]


def check_texts(texts: object, param: str) -> None:
    """Raise InputError if it is no sequence of strings. A bare string would be read as a text for each character."""
    if type(texts) is list and {str}.issuperset(map(type, texts)):
        return
    check_sequence(texts, param)
    for index, text in enumerate(cast("Sequence[object]", texts)):
        check_text(text, param, f"text {index}")


def check_sequence(values: object, param: str) -> None:
    """Raise InputError if it is no sequence of texts or other inputs; a string or bytes is one input, not many."""
    if isinstance(values, (str, bytes)):
        raise InputError(f"`{param}` must be a list, found one {type(values).__name__}; use [text]", param=param)
    if isinstance(values, Mapping) or not (hasattr(values, "__len__") and hasattr(values, "__getitem__")):
        raise InputError(f"`{param}` must be a list, found {type(values).__name__}", param=param)


def check_text(text: object, param: str, what: str = "") -> None:
    """Raise InputError if it is no string; `what` names the item of `param`."""
    if not isinstance(text, str):
        named = f"`{param}`: {what}" if what else f"`{param}`"
        raise InputError(f"{named} must be a string, found {type(text).__name__}", param=param)


def too_long(index: int, tokens: int, limit: int, param: str, more: str = "", what: str = "text") -> InputError:
    """A text or pair of `tokens` tokens, special ones included, exceeds the `limit`.

    `more` is "more than " where only so many are known. `what` has the `index`: "text" or "pair".
    """
    return InputError(
        f"`{param}`: {what} {index} has {more}{tokens} tokens, the limit is {limit}; "
        "shorten it or set truncate to true",
        param=param,
    )


def unbroken(index: int, characters: int, limit: int, param: str) -> InputTooLarge:
    """A text without split points that is too long to tokenize at once."""
    return InputTooLarge(
        f"`{param}`: text {index} has {characters} characters and no place to divide it for "
        f"{limit} of them, which is the limit",
        param=param,
    )


def bad_id(index: int, token_id: object, vocab_size: int, param: str) -> InputError:
    """A token id is not one of the model's."""
    # int() of a JSON number may have any number of digits, and repr refuses more than 4300 of them.
    shown = repr(token_id) if not isinstance(token_id, int) or abs(token_id) < 10**20 else "out of all bounds"
    return InputError(
        f"`{param}`: sequence {index} has the token id {shown}; ids are integers from 0 to {vocab_size - 1}",
        param=param,
    )


def untokenizable(index: int, reason: str, param: str) -> InputError:
    """The tokenizer fails on a text."""
    return InputError(f"`{param}`: text {index} cannot be tokenized: {reason}", param=param, kind="tokenizer")


def check_unicode(texts: Sequence[str], param: str) -> None:
    """Raise InputError for the first text with a lone surrogate, which the library answers with a TypeError."""
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(
                f"`{param}`: text {index} is not valid Unicode: it has a lone surrogate", param=param, kind="tokenizer"
            ) from None
