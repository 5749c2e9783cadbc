"""Pairs in a chat template, for decoders. A pair that is cut keeps the template's end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from embert.engine.errors import InputError
from embert.engine.files.chat_template import PairText
from embert.engine.tokenization.backend import ID_BYTES, Backend
from embert.engine.tokenization.encoded import Chunking, Chunks, Encoded, TokenizeOptions, groups, too_long
from embert.engine.tokenization.offsets import shorten
from embert.engine.tokenization.pairs.request import PairRequest, check_tokens, cut
from embert.engine.tokenization.split_points import SEEN

JOINT_TOKENS = 2  # that a text may have more next to another one than alone
BYTES_A_CHARACTER = 4  # at most, in UTF-8: no token is less than a byte
MOST_TOKEN_CHARACTERS = 64  # of a text on average: bounds what is read of one that is cut to a number of tokens


class ChatTemplatePairs:
    """Pairs in the template of one model."""

    def __init__(self, backend: Backend, pair_text: PairText, limit: int) -> None:
        self._backend, self._pair_text, self._limit = backend, pair_text, limit
        self._end: bytes | None = None  # of the template, read when first needed

    def encode_chunks(self, request: PairRequest) -> Chunks[Encoded]:
        """Encode pairs as sentence-transformers does: a text is cut as a whole, then its end becomes the template's."""
        firsts, seconds, options, chunking = request.firsts, request.seconds, request.options, request.chunking
        cuts = self._backend.cuts(options)
        if cuts:
            firsts = yield from self._shorten(firsts, options.first_limit, options.param, chunking)
            seconds = yield from self._shorten(seconds, options.second_limit, options.second_param, chunking)
        limit = min(options.limit or self._limit, self._limit) if cuts else self._limit
        if self._end is None:
            self._end = self._template_end()
        end, pair_text = self._end, self._pair_text
        request = dataclasses.replace(request, firsts=firsts, seconds=seconds)
        # A text that may be cut is not read whole: it may have no split point that keeps ids.
        if cuts and options.only_first and any(len(first) > chunking.part for first in firsts):
            return (yield from self._fit(request, limit))
        added = truncated = 0
        if options.instruction is not None:
            pair_text = yield from self._instruct(options.instruction, limit - len(end) // ID_BYTES, chunking)
            added = len(options.instruction)
        if limit <= len(end) // ID_BYTES:
            raise InputError(
                f"ends in {len(end) // ID_BYTES} tokens, and {limit} are allowed",
                param=options.second_param,
                subject="the chat template",
            )

        def refuse(index: int, tokens: int) -> InputError:
            return too_long(index, tokens, self._limit, options.second_param, "more than ", "pair")

        head = b""
        if len(firsts) == 1 < len(seconds) and self._split_before(seconds, pair_text.between):
            texts = [f"{pair_text.before}{firsts[0]}{pair_text.between}"]
            (head,) = yield from self._backend.read(
                texts, options, chunking, capacity=limit, param=options.second_param, refuse=refuse
            )
            firsts, pair_text = [""], PairText("", "", pair_text.after)
        firsts = [*firsts] * (len(seconds) if len(firsts) == 1 else 1)
        bodies: list[bytes] = []
        known = 0
        # A query of many documents is in memory once for each pair of a group, not for all of them.
        sizes = [added + len(first) + len(second) for first, second in zip(firsts, seconds, strict=True)]
        for group in groups(sizes, chunking.chunk):
            texts = [pair_text.join(*pair) for pair in zip(firsts[group], seconds[group], strict=True)]
            read = yield from self._backend.read(
                texts, options, chunking, capacity=limit, param=options.second_param, refuse=refuse, first=group.start
            )
            for index, rest in enumerate(read, group.start):
                body = head + rest
                tokens = len(body) // ID_BYTES
                known += min(tokens, limit)
                if tokens <= limit:
                    bodies.append(body)
                    continue
                if not cuts:
                    raise too_long(index, tokens, self._limit, options.second_param, what="pair")
                if options.only_first:
                    return (yield from self._fit(request, limit))
                kept = cut(body, limit, options.direction or self._backend.direction)
                bodies.append(kept[: len(kept) - len(end)] + end)
                truncated += 1
            if len(bodies) < len(seconds):
                yield known
        lengths = np.fromiter(map(len, bodies), np.int32, len(bodies)) // np.int32(ID_BYTES)
        check_tokens(lengths, options)
        return Encoded(np.frombuffer(b"".join(bodies), np.int32), lengths, truncated)

    def _fit(self, request: PairRequest, limit: int) -> Chunks[Encoded]:
        """Pairs whose first texts are cut to the tokens that the longest second text leaves to them.

        If one is cut, all pairs count as truncated. Raises InputError for a second text that leaves no token.
        """
        firsts, seconds, options, chunking = request.firsts, request.seconds, request.options, request.chunking

        def refuse(index: int, tokens: int) -> InputError:
            return InputError(
                f"has at least {tokens} tokens in the chat template; the limit is {limit}, and `{options.param}` needs "
                "some; shorten it",
                param=options.second_param,
                subject=f"question {index}",
            )

        texts = [self._pair_text.join("", second) for second in seconds]
        uncut = dataclasses.replace(options, truncate=False)
        bodies = yield from self._backend.read(
            texts, uncut, chunking, capacity=limit, param=options.second_param, refuse=refuse
        )
        lengths = [len(body) // ID_BYTES for body in bodies]
        left = limit - max(lengths, default=0) - JOINT_TOKENS
        if left < 1:
            raise refuse(lengths.index(max(lengths)), max(lengths))
        short_firsts = firsts
        if any(BYTES_A_CHARACTER * len(first) > left for first in firsts):
            short_firsts = yield from self._shorten(firsts, left, options.param, chunking)
        again = dataclasses.replace(options, only_first=False)
        encoded = yield from self.encode_chunks(dataclasses.replace(request, firsts=short_firsts, options=again))
        return encoded if short_firsts == firsts else dataclasses.replace(encoded, truncated=len(seconds))

    def _instruct(self, instruction: str, most: int, chunking: Chunking) -> Chunks[PairText]:
        """The template with the instruction of a request, whose tokens are counted once for all pairs.

        Raises InputError where the model takes none, and where it leaves less than one of `most` tokens to a pair.
        """
        param = "instruction"
        if self._pair_text.instructed is None:
            raise InputError("is not read by this model", param=param)
        pair_text = self._pair_text.with_instruction(instruction)

        def refuse(_index: int, tokens: int) -> InputError:
            return InputError(
                f"has {len(instruction)} characters, and more than {tokens - 1} tokens with the text around it; the "
                f"limit is {most - 1}",
                param=param,
            )

        whole = TokenizeOptions(truncate=False)
        (head,) = yield from self._backend.read(
            [pair_text.before], whole, chunking, capacity=most, param=param, refuse=refuse
        )
        if len(head) // ID_BYTES >= most:
            raise refuse(0, len(head) // ID_BYTES)
        return pair_text

    def _shorten(
        self, texts: Sequence[str], limit: int | None, param: str, chunking: Chunking
    ) -> Chunks[Sequence[str]]:
        """The texts, each without what is over a number of tokens."""
        if limit is None or limit >= self._limit:
            return texts  # the pair as a whole is cut
        # A token has a character at least.
        long = [text[: limit * MOST_TOKEN_CHARACTERS] if len(text) > limit else "" for text in texts]
        read = yield from shorten(self._backend, long, limit, param=param, most_unbroken=chunking.most_unbroken)
        return [short or text for short, text in zip(read, texts, strict=True)]

    def _split_before(self, texts: Sequence[str], before: str) -> bool:
        """True if each text begins at a split point where it follows `before`: the tokens of both are their own."""
        points = self._backend.split_points
        if points.of_ids is None or points.lead:
            return False
        return all(points.of_ids.match(before + text[:SEEN], len(before)) for text in texts)

    def _template_end(self) -> bytes:
        """Ids of the tokens that all pairs end in."""
        ends = [self._backend.library_ids([self._pair_text.join(filler, filler)])[0] for filler in ("0", "1 2 3 4")]
        first, second = (np.frombuffer(end, np.int32)[::-1] for end in ends)
        shorter = min(len(first), len(second))
        differ = np.flatnonzero(first[:shorter] != second[:shorter])
        count = int(differ[0]) if len(differ) else 0
        return ends[0][len(ends[0]) - count * ID_BYTES :]
