"""Clients: what they send, what counts as an answer, and when they send it."""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import gevent
from gevent.pool import Group
from locust import FastHttpUser, constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

from benchmarks.lib.texts import PASSAGE_TOKENS, QUERY_TOKENS, texts
from embert.engine import load_model

__all__ = ["Client", "OpenLoop", "late_s", "options_of", "passages", "queries"]


# By how much locust itself was late with what was due, lately: its own loop was busy then.
late_s: deque[float] = deque(maxlen=10_000)


@events.init_command_line_parser.add_listener
def _add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--rate", type=float, default=50.0, help="requests/s of clients that do not wait for answers")
    parser.add_argument("--key", default="", help="API key", is_secret=True)


@events.init.add_listener
def _look_at_the_clock(**_: Any) -> None:
    """Importing takes seconds, of which gevent's loop knows nothing: the end of the test would come early by them."""
    gevent.get_hub().loop.update_now()


def options_of(environment: Environment) -> argparse.Namespace:
    """What was typed."""
    return cast("argparse.Namespace", environment.parsed_options)


def queries(count: int = 500) -> list[str]:
    """Short texts, 11 tokens on average."""
    return [text.text for text in texts(QUERY_TOKENS, count, _tokenizer())]


def passages(count: int = 640) -> list[str]:
    """Longer ones, 104 tokens on average."""
    return [text.text for text in texts(PASSAGE_TOKENS, count, _tokenizer(), seed=1)]


def _tokenizer() -> Any:
    return load_model().transformer_folder / "tokenizer.json"


class Client(FastHttpUser):
    """Asks for embeddings; 200 is an answer, 429 with Retry-After a polite refusal, and all else a failure."""

    abstract = True
    wait_time = constant(0)
    refusals_are_fine = False  # 429 gets a line of its own instead of being a failure

    def on_start(self) -> None:
        """Remember the key."""
        key = options_of(self.environment).key
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def ask(self, name: str, inputs: Sequence[str], *, due: float | None = None, priority: str = "") -> None:
        """Send `inputs`; the time counts from `due` (perf_counter), or from now."""
        headers = {**self._headers, "x-priority": priority} if priority else self._headers
        body = {"input": list(inputs), "encoding_format": "base64"}
        with self.client.post("/v1/embeddings", json=body, name=name, headers=headers, catch_response=True) as answer:
            meta: dict[str, Any] = answer.request_meta
            if due is not None:
                meta["response_time"] = (time.perf_counter() - due) * 1e3
            if answer.status_code == 429 and self.refusals_are_fine and answer.headers.get("retry-after"):
                meta["name"] = f"{name} refused"
                answer.success()
            elif answer.status_code != 200:
                answer.failure(f"status {answer.status_code}")
            elif len(answer.json()["data"]) != len(inputs):
                answer.failure("an answer to something else")


class OpenLoop(Client):
    """Sends at Poisson arrivals whatever the server does: a stalled server cannot slow its own judge.

    All users together send `--rate` requests/s.
    """

    abstract = True
    concurrency = 1000
    users = 0  # how many share the rate; 0 means all

    def on_start(self) -> None:
        """Be due at once."""
        super().on_start()
        options = options_of(self.environment)
        self._rate = options.rate / (self.users or options.num_users or 1)
        self._due = time.perf_counter()
        self._asking = Group()

    def on_stop(self) -> None:
        """Wait a little for what is on its way, so that it is counted."""
        self._asking.join(timeout=10)
        self._asking.kill()

    @task
    def arrive(self) -> None:
        """Wait for the next arrival and send it, in a greenlet of its own."""
        self._due += random.expovariate(self._rate)
        gevent.sleep(max(0.0, self._due - time.perf_counter()))
        late_s.append(time.perf_counter() - self._due)
        self._asking.spawn(self.send, self._due)

    def send(self, due: float) -> None:
        """Send what was due then."""
        raise NotImplementedError
