"""Texts to token ids, as the model's tokenizer.json says, cut to the model's length."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as Backend
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as Normalizers

from engine.errors import BrokenModel, InputError
from engine.json_files import read_object
from engine.model import Model
from engine.word_cache import WordCache

__all__ = ["Direction", "Encoded", "TokenInfo", "Tokenizer"]

Direction = Literal["right", "left"]  # the end that is cut off

ID_BYTES = 4  # int32


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of B texts, laid end to end."""

    ids: npt.NDArray[np.int32]  # [T]
    lengths: npt.NDArray[np.int32]  # [B], each 1 … max_input_length
    truncated: int  # how many of the B texts were cut

    @property
    def tokens(self) -> int:
        """T, the number of tokens."""
        return len(self.ids)

    @property
    def sequences(self) -> int:
        """B, the number of texts."""
        return len(self.lengths)


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One token of a text; `start` and `stop` count characters and are None for special tokens."""

    id: int
    text: str  # the characters it stands for; a special token's own name
    special: bool
    start: int | None
    stop: int | None


class Tokenizer:
    """The tokenizer of one model. Safe to use from several threads, which then run at the same time.

    The library's padding and truncation stay off: cutting is done here, on ids, so that one object serves requests that
    cut differently.
    """

    def __init__(self, model: Model) -> None:
        """Read the model's tokenizer.json. Raises BrokenModel."""
        path = model.transformer_folder / "tokenizer.json"
        description = read_object(path)
        try:
            # The whole file is read again in Rust; handing over the parsed object would cost more.
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise BrokenModel(f"{path} is not a tokenizer that can be read: {error}") from error
        self._backend.no_padding()
        self._backend.no_truncation()
        self.vocab_size = model.config.vocab_size  # ids that may be given: 0 … vocab_size - 1
        self.max_input_length = model.max_input_length  # tokens, special tokens included
        if self._backend.get_vocab_size() > self.vocab_size:
            raise BrokenModel(
                f"{path} has {self._backend.get_vocab_size()} tokens, the model has embeddings for {self.vocab_size}"
            )
        if model.lowercase:
            self._lowercase()
        self._prefix, self._suffix = self._special_ids()
        # How many tokens of the text itself fit.
        self._room = self.max_input_length - (len(self._prefix) + len(self._suffix)) // ID_BYTES
        if self._room < 1:
            raise BrokenModel(f"{path}: no room for text within max_input_length {self.max_input_length}")
        self._words = WordCache(self._library) if not model.lowercase and WordCache.supports(description) else None

    def encode(
        self,
        texts: Sequence[str],
        *,
        truncate: bool,
        direction: Direction = "right",
        prompt: str = "",
        param: str = "inputs",
    ) -> Encoded:
        """Tokenize, with the special tokens of a single text.

        `prompt` is put before every text. `direction` is the end that is cut off. `param` is the request field that
        errors name. Raises InputError for a text that is too long while `truncate` is false, or is not valid Unicode.
        """
        if prompt:
            texts = [prompt + text for text in texts]
        try:
            bodies = self._bodies(texts, self._wanted(truncate), direction)
        except TypeError:
            _check_unicode(texts, param)
            raise
        return self._encoded(bodies, truncate, direction, param)

    def encode_known(
        self,
        texts: Sequence[str],
        *,
        truncate: bool,
        direction: Direction = "right",
        prompt: str = "",
        param: str = "inputs",
    ) -> Encoded | None:
        """As `encode`, but None unless every word was seen before: a tenth of the work, which no thread is worth."""
        if self._words is None:
            return None
        split = []
        for text in texts:
            chunks = self._words.chunks(prompt + text if prompt else text)
            if chunks is None:
                return None
            split.append(_cut(chunks, self._wanted(truncate), direction))
        bodies = self._words.known(split)
        return None if bodies is None else self._encoded(bodies, truncate, direction, param)

    def _wanted(self, truncate: bool) -> int | None:
        """Tokens that need be known: a little past the limit is enough to cut, but not to say how long a text is."""
        return self._room + 1 if truncate else None

    def _encoded(self, bodies: Sequence[bytes], truncate: bool, direction: Direction, param: str) -> Encoded:
        """Ids of texts without special tokens, cut, put between those and laid end to end."""
        limit, truncated = self._room * ID_BYTES, 0
        lengths = array("i")
        pieces: list[bytes] = []
        overhead = len(self._prefix) + len(self._suffix)
        for body in bodies:
            if len(body) > limit:
                if not truncate:
                    raise self._too_long(len(pieces) // 3, (len(body) + overhead) // ID_BYTES, param)
                truncated += 1
                body = body[:limit] if direction == "right" else body[-limit:]
            pieces += (self._prefix, body, self._suffix)
            lengths.append((len(body) + overhead) // ID_BYTES)
        # A bytearray, so that the array is writable, which torch asks for.
        ids = np.frombuffer(bytearray().join(pieces), np.int32)
        return Encoded(ids, np.frombuffer(lengths, np.int32) if lengths else np.zeros(0, np.int32), truncated)

    def from_ids(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        truncate: bool,
        direction: Direction = "right",
        param: str = "inputs",
    ) -> Encoded:
        """Take token ids as they are: nothing is added. Raises InputError for ids that the model does not have."""
        ids, lengths, truncated = array("i"), array("i"), 0
        for index, given in enumerate(sequences):
            sequence = given
            if not len(sequence):
                raise InputError(f"`{param}`: sequence {index} has no token ids", param=param)
            if len(sequence) > self.max_input_length:
                if not truncate:
                    raise self._too_long(index, len(sequence), param)
                truncated += 1
                limit = self.max_input_length
                sequence = sequence[:limit] if direction == "right" else sequence[-limit:]
            # Before the array, which would overflow, and which takes True for 1.
            if not {int} >= {*map(type, sequence)} or min(sequence) < 0 or max(sequence) >= self.vocab_size:
                wrong = next(i for i in sequence if type(i) is not int or not 0 <= i < self.vocab_size)
                raise self._bad_id(index, wrong, param)
            ids.extend(sequence)
            lengths.append(len(sequence))
        return Encoded(np.array(ids, np.int32), np.array(lengths, np.int32), truncated)

    def tokenize(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        prompt: str = "",
        param: str = "inputs",
    ) -> list[list[TokenInfo]]:
        """Tokens with their places. With a prompt, places count from the prompt's first character. Nothing is cut."""
        whole = [prompt + text for text in texts]
        answer = []
        try:
            encodings = self._backend.encode_batch(whole, add_special_tokens=add_special_tokens)
        except TypeError:
            _check_unicode(whole, param)
            raise
        for text, encoding in zip(whole, encodings, strict=True):
            tokens = []
            for token_id, token, (start, stop), special in zip(
                encoding.ids, encoding.tokens, encoding.offsets, encoding.special_tokens_mask, strict=True
            ):
                if special:
                    tokens.append(TokenInfo(token_id, token, True, None, None))
                else:
                    tokens.append(TokenInfo(token_id, text[start:stop], False, start, stop))
            answer.append(tokens)
        return answer

    def decode(
        self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = True, param: str = "ids"
    ) -> list[str]:
        """Token ids back to text. Raises InputError for ids that the model does not have."""
        for index, sequence in enumerate(sequences):
            for token_id in sequence:
                if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                    raise self._bad_id(index, token_id, param)
        return self._backend.decode_batch([list(s) for s in sequences], skip_special_tokens=skip_special_tokens)

    def _bodies(self, texts: Sequence[str], wanted: int | None, direction: Direction) -> list[bytes]:
        """Ids of each text without special tokens; at least its `wanted` first (last) ones where it has more."""
        words = self._words
        if words is None:
            return self._library(texts)
        split = [None if (c := words.chunks(text)) is None else _cut(c, wanted, direction) for text in texts]
        if None not in split:
            return words.lookup(split)  # type: ignore[arg-type]  # None was just ruled out
        whole = iter(self._library([t for t, chunks in zip(texts, split, strict=True) if chunks is None]))
        looked_up = iter(words.lookup([chunks for chunks in split if chunks is not None]))
        return [next(whole if chunks is None else looked_up) for chunks in split]

    def _library(self, texts: Sequence[str]) -> list[bytes]:
        """Ids of each text as the library gives them, without special tokens. TypeError for a text with a surrogate."""
        # The batch calls release the GIL; `encode` holds it.
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [array("i", encoding.ids).tobytes() for encoding in encodings]

    def _special_ids(self) -> tuple[bytes, bytes]:
        """What the post-processor puts before and after a text."""
        bare, full = (self._backend.encode("a", add_special_tokens=special) for special in (False, True))
        before = full.special_tokens_mask.index(0)
        if full.ids[before : before + len(bare)] != bare.ids:
            raise BrokenModel("the tokenizer puts special tokens inside a text, not around it")
        return array("i", full.ids[:before]).tobytes(), array("i", full.ids[before + len(bare) :]).tobytes()

    def _lowercase(self) -> None:
        """Lowercase before everything else: sentence_bert_config.json's do_lower_case."""
        normalizer = self._backend.normalizer
        self._backend.normalizer = Normalizers([Lowercase(), *([normalizer] if normalizer else [])])

    def _too_long(self, index: int, tokens: int, param: str) -> InputError:
        return InputError(
            f"`{param}`: text {index} has {tokens} tokens, the limit is {self.max_input_length}; "
            "shorten it or set truncate to true",
            param=param,
        )

    def _bad_id(self, index: int, token_id: object, param: str) -> InputError:
        # int() of a JSON number may have any number of digits, and repr refuses more than 4300 of them.
        shown = repr(token_id) if not isinstance(token_id, int) or abs(token_id) < 10**20 else "out of all bounds"
        return InputError(
            f"`{param}`: sequence {index} has the token id {shown}; ids are integers from 0 to {self.vocab_size - 1}",
            param=param,
        )


def _cut(chunks: list[str], wanted: int | None, direction: Direction) -> list[str]:
    """The chunks that hold the `wanted` first (last) tokens: each is at least one."""
    if wanted is None or len(chunks) <= wanted:
        return chunks
    return chunks[:wanted] if direction == "right" else chunks[-wanted:]


def _check_unicode(texts: Sequence[str], param: str) -> None:
    """Raise InputError for the first text with a lone surrogate, which the library does not take for a str."""
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(
                f"`{param}`: text {index} is not valid Unicode: it has a lone surrogate", param=param, kind="tokenizer"
            ) from None
