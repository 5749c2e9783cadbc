"""Reads long texts in parts, and no further than needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from embert.engine.errors import InputError
from embert.engine.tokenization.backend import ID_BYTES, Backend, TokenizerFailed
from embert.engine.tokenization.encoded import Chunks, Direction, check_unicode, groups, unbroken, untokenizable
from embert.engine.tokenization.split_points import NoSplitPoint, SplitPoints

__all__ = ["TextParts", "read_bodies"]

TEXT_CHARACTERS = 32  # overhead of a text, in characters


class TextParts:
    """The parts of one text, from the end that is kept when the text is cut."""

    __slots__ = (
        "_end",
        "_left",
        "_most",
        "_pattern",
        "_shorten",
        "_split_points",
        "_text",
        "index",
        "param",
        "start",
    )

    def __init__(
        self,
        text: str,
        split_points: SplitPoints,
        direction: Direction,
        most: int,
        *,
        index: int,
        param: str,
        offsets: bool = False,
    ) -> None:
        """`most` characters may lack a split point. `index` and `param` are for messages.

        `offsets` asks for split points that keep offsets, too, and not only ids.
        """
        self._text, self._split_points, self._most = text, split_points, most
        self.index, self.param = index, param
        self._left = direction == "left"
        self._pattern = split_points.of_offsets if offsets else split_points.of_ids
        self._shorten = not offsets  # shortening moves offsets
        self.start, self._end = 0, len(text)  # of what is left

    @property
    def more(self) -> bool:
        """Whether anything is left."""
        return self.start < self._end

    def take(self, size: int) -> tuple[bool, str]:
        """The next part, of `size` characters or somewhat more, and whether the lead was put before it.

        Raises InputTooLarge if there is no split point within the limit.
        """
        most = max(size, self._most)
        while True:
            try:
                start, end = self._next(size, most)
                break
            except NoSplitPoint:
                inside = self._end - size if self._left else self.start + size
                shorter = self._split_points.shorten(self._text, inside) if self._shorten else None
                if shorter is None:
                    raise unbroken(self.index, self._end - self.start, self._most, self.param) from None
                self._end -= len(self._text) - len(shorter)
                self._text = shorter
        if self._left:
            self._end = start
        else:
            self.start = end
        lead = self._split_points.lead if start else ""
        return bool(lead), lead + self._text[start:end]

    def _next(self, size: int, most: int) -> tuple[int, int]:
        if self._left:
            return self._split_points.start(self._text, self._end, size, most, self._pattern), self._end
        return self.start, self._split_points.end(self._text, self.start, size, most, self._pattern)


def read_bodies(
    backend: Backend,
    texts: Sequence[str],
    *,
    capacity: int,
    truncate: bool,
    direction: Direction,
    param: str,
    most_unbroken: int,
    part: int,
    chunk_characters: int,
    refuse: Callable[[int, int], InputError],
) -> Chunks[list[bytes]]:
    """Ids of each text without special tokens, in chunks of about `chunk_characters`; parts have `part` characters.

    Of a text with more than `capacity` tokens, the end that is kept is read until more than `capacity` are known; while
    `truncate` is false, `refuse` makes the error from the text's index and the number known. Raises InputTooLarge,
    before the work, for a text without a split point for over `most_unbroken` characters.
    """
    # One past the capacity is enough to cut, but not to say how long a text is.
    limit = capacity + 1 if truncate else None
    sizes = [*map(len, texts)]
    bodies: list[bytes] = []
    tokens = 0
    try:
        if sum(sizes) + len(sizes) * TEXT_CHARACTERS <= chunk_characters and max(sizes, default=0) <= part:
            return _ids(backend, texts, limit, direction, enumerate(texts), param)
        for group in groups([min(size, part) + TEXT_CHARACTERS for size in sizes], chunk_characters):
            parts = [
                TextParts(text, backend.split_points, direction, most_unbroken, index=index, param=param)
                for index, text in enumerate(texts[group], group.start)
            ]
            bodies += _next_bodies(backend, parts, part, limit, direction)
            tokens += sum(map(len, bodies[group])) // ID_BYTES
            yield tokens
            for index, rest in enumerate(parts, group.start):
                while rest.more and len(bodies[index]) <= capacity * ID_BYTES:
                    (body,) = _next_bodies(backend, [rest], chunk_characters, limit, direction)
                    bodies[index] = bodies[index] + body if direction == "right" else body + bodies[index]
                    tokens += len(body) // ID_BYTES
                    yield tokens
                if rest.more and not truncate:
                    raise refuse(index, len(bodies[index]) // ID_BYTES)
    except TypeError:
        check_unicode(texts, param)
        raise
    return bodies


def _next_bodies(
    backend: Backend, parts: Sequence[TextParts], size: int, limit: int | None, direction: Direction
) -> list[bytes]:
    """Ids of the next part of each text, of `size` characters or somewhat more."""
    taken = [part.take(size) for part in parts]
    places = ((part.index, text) for part, (_, text) in zip(parts, taken, strict=True))
    bodies = _ids(backend, [text for _, text in taken], limit, direction, places, parts[0].param)
    lead = backend.lead_tokens * ID_BYTES
    return [body[lead:] if led else body for (led, _), body in zip(taken, bodies, strict=True)]


def _ids(
    backend: Backend,
    texts: Sequence[str],
    limit: int | None,
    direction: Direction,
    places: Iterable[tuple[int, str]],
    param: str,
) -> list[bytes]:
    """As `Backend.ids`. Raises InputError for the first of `places`, indices and texts, that cannot be tokenized."""
    try:
        return backend.ids(texts, limit, direction)
    except TokenizerFailed:
        for index, text in places:
            try:
                backend.library_ids([text])
            except TokenizerFailed as error:
                raise untokenizable(index, str(error), param) from error
        raise
