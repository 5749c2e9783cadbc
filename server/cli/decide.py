"""`embert decide MODEL FILE`: decisions for requests of a file without a server, as JSON lines."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

import orjson
from tqdm import tqdm

from embert.engine import Engine
from embert.engine.errors import InputError
from embert.server.bulk.job import BulkError
from embert.server.bulk.reader import STANDARD_INPUT
from embert.server.bulk.writer import write_errors
from embert.server.cli.arguments import load_engine
from embert.server.http.errors import ServerError
from embert.server.protocols.decisions import (
    DecisionsRequest,
    SystemOneRequest,
    answers,
    diagnostics_of,
    read_decisions_request,
    read_system_one_request,
    system_one_answers,
)
from embert.server.request.request_body import validate


def decide(arguments: argparse.Namespace) -> None:
    requests = _read(arguments.file)
    with load_engine(arguments) as engine, write_errors("standard output"):
        for number, request in enumerate(
            tqdm(requests, unit=" requests", disable=arguments.quiet or None, leave=False)
        ):
            try:
                line = _respond(engine, request, truncate=arguments.truncate)
            except (InputError, ServerError) as error:
                raise BulkError(f"{arguments.file}: request {number}: {error}") from None
            sys.stdout.buffer.write(orjson.dumps(line) + b"\n")
        sys.stdout.buffer.flush()


def _read(file: str) -> list[Any]:
    """The requests of a file: one JSON value, a list of them, or one a line. Raises BulkError."""
    content = sys.stdin.buffer.read() if file == STANDARD_INPUT else Path(file).read_bytes()
    with contextlib.suppress(ValueError):
        whole = orjson.loads(content)
        return whole if isinstance(whole, list) else [whole]
    requests = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            requests += [orjson.loads(line)] if line.strip() else []
        except ValueError as error:
            raise BulkError(f"{file}: line {number} is not JSON: {error}") from None
    return requests


def _respond(engine: Engine, value: Any, *, truncate: bool) -> dict[str, Any]:
    """The answers to a request in the form of either API. Raises InputError or ServerError."""
    if isinstance(value, dict) and "state" in value:
        request = validate(SystemOneRequest, value)
        state, questions = read_system_one_request(request)
        results = engine.decide(state, questions, label_mass=request.label_mass, truncate=truncate)
        masses = diagnostics_of(request, results)
        by_name = dict(system_one_answers(request, questions, results))
        return {"answers": by_name, **({"diagnostics": masses} if masses else {})}
    body = validate(DecisionsRequest, value)
    state, questions = read_decisions_request(body)
    results = engine.decide(state, questions, label_mass=body.label_mass, truncate=truncate)
    return {"answers": [*answers(body, results)]}
