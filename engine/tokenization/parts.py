"""A long text, taken part by part."""

from __future__ import annotations

from embert.engine.tokenization.encoded import Direction
from embert.engine.tokenization.input_errors import unbroken
from embert.engine.tokenization.split_points import NoSplitPoint, SplitPoints

__all__ = ["TextParts"]


class TextParts:
    """The parts of one text, from the end that is kept when the text is cut."""

    __slots__ = (
        "_end",
        "_index",
        "_left",
        "_most",
        "_param",
        "_pattern",
        "_shorten",
        "_split_points",
        "_text",
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
        self._index, self._param = index, param
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
                    raise unbroken(self._index, self._end - self.start, self._most, self._param) from None
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
