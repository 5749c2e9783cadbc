"""Pairs of texts, in the form that a model reads: between special tokens, in a chat template, or at markers."""

from __future__ import annotations

from collections.abc import Sequence

from embert.engine.heads.description import MarkerDecider
from embert.engine.model import Model
from embert.engine.tokenization.backend import Backend
from embert.engine.tokenization.encoded import Chunking, Chunks, Encoded, TokenizeOptions
from embert.engine.tokenization.pairs.chat_template import ChatTemplatePairs
from embert.engine.tokenization.pairs.markers import MarkerPairs
from embert.engine.tokenization.pairs.request import PairRequest
from embert.engine.tokenization.pairs.special_tokens import SpecialTokenPairs


class Pairs:
    """Pairs of one model. Safe to use from several threads."""

    def __init__(self, backend: Backend, model: Model) -> None:
        decider = model.heads.decider
        self._form: SpecialTokenPairs | ChatTemplatePairs | MarkerPairs
        self._cached_form: SpecialTokenPairs | None = None  # set if the ids of cached words make its pairs
        if model.pair_text is not None:
            self._form = ChatTemplatePairs(backend, model.pair_text, model.max_input_length)
        elif isinstance(decider, MarkerDecider):
            self._form = MarkerPairs(backend, decider)
        else:
            self._form = special = SpecialTokenPairs(backend, model)
            self._cached_form = special if decider is None else None

    def encode_chunks(
        self, firsts: Sequence[str], seconds: Sequence[str], options: TokenizeOptions, chunking: Chunking
    ) -> Chunks[Encoded]:
        return (yield from self._form.encode_chunks(PairRequest(firsts, seconds, options, chunking)))

    def encode_known(
        self, firsts: Sequence[str], seconds: Sequence[str], options: TokenizeOptions, chunking: Chunking
    ) -> Encoded | None:
        """The pairs, if the ids of each word are known. Otherwise None."""
        if self._cached_form is None:
            return None
        return self._cached_form.encode_known(PairRequest(firsts, seconds, options, chunking))
