"""The users of all scenarios: what they send, when they send it, and what counts as an response."""

from __future__ import annotations

import argparse
import random
import time
from abc import ABCMeta, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, cast

import gevent
from gevent.pool import Group
from locust import FastHttpUser, constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.user.users import UserMeta

from benchmarks.lib.texts import PASSAGE_TOKENS, QUERY_TOKENS, texts
from embert.engine import load_model
from loadtests.verdict import FAILED, REFUSED

# How late locust sent the latest requests, s: a busy locust delays them.
late_s: deque[float] = deque(maxlen=10_000)


@events.init_command_line_parser.add_listener
def _add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--rate", type=float, default=50.0, help="requests/s of users that do not wait for responses")
    parser.add_argument("--key", default="", env_var="EMBERT_API_KEY", help="API key", is_secret=True)


@events.init.add_listener
def _update_gevent_clock(**_: Any) -> None:
    """Tell gevent's loop about the seconds that importing takes; without this the test ends early by them."""
    gevent.get_hub().loop.update_now()


def options_of(environment: Environment) -> argparse.Namespace:
    """Return the options of the command line."""
    return cast("argparse.Namespace", environment.parsed_options)


def queries(count: int = 500) -> list[str]:
    """Return short texts, 11 tokens on average."""
    return [text.text for text in texts(QUERY_TOKENS, count, _tokenizer())]


def passages(count: int = 640) -> list[str]:
    """Return longer texts, 104 tokens on average."""
    return [text.text for text in texts(PASSAGE_TOKENS, count, _tokenizer(), seed=1)]


def _tokenizer() -> Any:
    return load_model().transformer_folder / "tokenizer.json"


class EmbeddingUser(FastHttpUser):
    """Asks for embeddings, or for documents by relevance. 200 is a success; every other status is a failure.

    A 429 with Retry-After is neither. It has its own row, and so have failures: times are those of responses.
    """

    abstract = True
    wait_time = constant(0)

    def on_start(self) -> None:
        key = options_of(self.environment).key
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def embed(self, name: str, inputs: Sequence[str], *, due: float | None = None, priority: str = "") -> None:
        """Send `inputs`. The response time counts from `due` (perf_counter), or from now."""
        body = {"input": list(inputs), "encoding_format": "base64"}
        self._ask(name, "/v1/embeddings", body, "data", len(inputs), due, priority)

    def rerank(self, name: str, query: str, documents: Sequence[str], *, due: float | None = None) -> None:
        """Send a query and documents. The response time counts from `due` (perf_counter), or from now."""
        self._ask(name, "/v1/rerank", {"query": query, "documents": list(documents)}, "results", len(documents), due)

    def _ask(
        self,
        name: str,
        path: str,
        body: Mapping[str, Any],
        field: str,
        rows: int,
        due: float | None,
        priority: str = "",
    ) -> None:
        """Send `body`, and check that the response has `rows` rows in `field`."""
        headers = {**self._headers, "x-priority": priority} if priority else self._headers
        with self.client.post(path, json=body, name=name, headers=headers, catch_response=True) as response:
            meta: dict[str, Any] = response.request_meta
            if due is not None:
                meta["response_time"] = (time.perf_counter() - due) * 1e3
            if response.status_code == 429 and (wait_s := response.headers.get("retry-after")):
                meta["name"] = f"{name}{REFUSED}"
                response.success()
            elif response.status_code != 200:
                meta["name"] = f"{name}{FAILED}"
                response.failure(f"status {response.status_code}")
            elif len(response.json()[field]) != rows:
                response.failure("a response with another number of rows")
        if response.status_code == 429 and due is None:
            gevent.sleep(float(wait_s or 1))  # as clients should; one that waits for its responses would only spin


class _AbstractUserMeta(ABCMeta, UserMeta):
    """A class of users with abstract methods: locust has its own metaclass."""


class OpenLoopUser(EmbeddingUser, metaclass=_AbstractUserMeta):
    """Sends at Poisson arrivals whatever the server does, so a server that stalls cannot slow the load down.

    All users together send `--rate` requests/s.
    """

    abstract = True
    concurrency = 1000
    users = 0  # how many users share the rate; 0 means all

    def on_start(self) -> None:
        super().on_start()
        options = options_of(self.environment)
        self._rate = options.rate / (self.users or options.num_users or 1)
        self._due = time.perf_counter()
        self._asking = Group()

    def on_stop(self) -> None:
        """Wait up to 10 s for outstanding responses, so that they count."""
        self._asking.join(timeout=10)
        self._asking.kill()

    @task
    def arrive(self) -> None:
        """Wait for the next arrival, and send it in its own greenlet."""
        self._due += random.expovariate(self._rate)
        gevent.sleep(max(0.0, self._due - time.perf_counter()))
        late_s.append(time.perf_counter() - self._due)
        self._asking.spawn(self.send, self._due)

    @abstractmethod
    def send(self, due: float) -> None:
        """Send one request that was due at `due` (perf_counter)."""
