"""How much one request may ask for: texts, tokens, and what its answer is made of."""

from __future__ import annotations

from embert.server.config import ServeConfig
from embert.server.http.errors import PayloadTooLarge

__all__ = ["RequestLimits"]


class RequestLimits:
    """The limits of the server's options. Each check raises PayloadTooLarge, naming the field `param` and the option.

    With `more`, not everything is counted yet.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._config = config

    def check_count(self, count: int, param: str) -> None:
        """The texts of a request."""
        limit = self._config.max_client_batch_size
        if count > limit:
            raise PayloadTooLarge(f"`{param}` has {count} texts; the limit is {limit} (--max-client-batch-size)", param)

    def check_documents(self, count: int, param: str) -> None:
        """The documents or pairs of a request."""
        limit = self._config.max_client_documents
        if count > limit:
            raise PayloadTooLarge(f"`{param}` has {count} texts; the limit is {limit} (--max-client-documents)", param)

    def check_tokens(self, tokens: int, param: str, *, more: bool = False) -> None:
        """The tokens of a request."""
        limit = self._config.max_client_batch_tokens
        if limit is not None and tokens > limit:
            has = _number(tokens, more)
            raise PayloadTooLarge(
                f"`{param}` has {has} tokens; the limit is {limit} (--max-client-batch-tokens)", param
            )

    def check_pair_tokens(self, tokens: int, param: str, *, more: bool = False) -> None:
        """The tokens of pairs, whose texts may be in several: no more than a body may have bytes."""
        self.check_tokens(tokens, param, more=more)
        limit = self._config.payload_limit
        if tokens > limit:
            has = _number(tokens, more)
            raise PayloadTooLarge(
                f"`{param}` makes pairs of {has} tokens; the limit is {limit} (--payload-limit)", param
            )

    def check_answer(self, tokens: int, param: str, *, more: bool = False) -> None:
        """The tokens that an answer of /tokenize or /decode is about."""
        self.check_tokens(tokens, param, more=more)
        limit = self._config.max_answer_tokens
        if tokens > limit:
            has = _number(tokens, more)
            raise PayloadTooLarge(f"`{param}` has {has} tokens; the limit is {limit} (--max-answer-tokens)", param)

    def check_weights(self, weights: int, param: str) -> None:
        """The weights of an answer's sparse vectors, counted while they come, and its scores of labels."""
        limit = self._config.max_answer_weights
        if weights > limit:
            raise PayloadTooLarge(
                f"the answer to `{param}` has at least {weights} weights or scores; the limit is {limit} "
                "(--max-answer-weights)",
                param,
            )


def _number(count: int, more: bool) -> str:
    return f"at least {count}" if more else f"{count}"
