"""How much one request may ask for: texts, tokens, and what its answer is made of."""

from __future__ import annotations

from embert.server.config import ServeConfig, option_name
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
        self._check(f"`{param}` has", count, "texts", "max_client_batch_size", param)

    def check_documents(self, count: int, param: str) -> None:
        """The documents or pairs of a request."""
        self._check(f"`{param}` has", count, "texts", "max_client_documents", param)

    def check_tokens(self, tokens: int, param: str, *, more: bool = False) -> None:
        """The tokens of a request."""
        if self._config.max_client_batch_tokens is not None:
            self._check(f"`{param}` has", tokens, "tokens", "max_client_batch_tokens", param, more=more)

    def check_pair_tokens(self, tokens: int, param: str, *, more: bool = False) -> None:
        """The tokens of pairs, whose texts may be in several: no more than a body may have bytes."""
        self.check_tokens(tokens, param, more=more)
        self._check(f"`{param}` makes pairs of", tokens, "tokens", "payload_limit", param, more=more)

    def check_answer(self, tokens: int, param: str, *, more: bool = False) -> None:
        """The tokens that an answer of /tokenize or /decode is about."""
        self.check_tokens(tokens, param, more=more)
        self._check(f"`{param}` has", tokens, "tokens", "max_answer_tokens", param, more=more)

    def check_weights(self, weights: int, param: str) -> None:
        """The weights of an answer's sparse vectors, counted while they come."""
        has = f"the sparse vectors of `{param}` have"
        self._check(has, weights, "weights together", "max_answer_weights", param, more=True)

    def _check(self, has: str, count: int, what: str, option: str, param: str, *, more: bool = False) -> None:
        limit = getattr(self._config, option)
        if count > limit:
            number = f"at least {count}" if more else f"{count}"
            raise PayloadTooLarge(f"{has} {number} {what}; the limit is {limit} ({option_name(option)})", param)
