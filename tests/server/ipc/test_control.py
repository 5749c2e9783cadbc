"""The control connection between the supervisor and its children, and the messages on it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from embert.server.config import ServeConfig, model_configs
from embert.server.ipc.channel import (
    EncodeRequest,
    EngineStatus,
    PartialResult,
    Results,
    Submit,
    TaskRows,
    TextRows,
    decode_results,
    decode_submit,
    encode,
)
from embert.server.ipc.control import (
    ControlConnection,
    Drain,
    EngineState,
    Failed,
    LoadModel,
    Message,
    ModelFailed,
    ModelInfo,
    ModelReady,
    ModelState,
    Progress,
    Ready,
    StartEngine,
    StartHttp,
    StartModel,
)

INFO = ModelInfo("torch", "cpu", "AMD EPYC™", "float32", "no CUDA", 2048, 384, 384, 1.5, 0.2, 0.3)
CONFIG = ServeConfig(model=("a=/models/ünïcode", "b"), api_key=("a", "b"), request_timeout=0.5)
MODELS = [StartModel(number, config, "/m", "id", None) for number, config in enumerate(model_configs(CONFIG))]
MESSAGES: list[Message] = [
    EngineState(1, "ready", "", "/tmp/x", {0: ModelState("ready", "", INFO), 12: ModelState("failed", "why")}),
    EngineState(0, "down", "was killed\nby SIGKILL"),
    StartHttp(CONFIG, MODELS, {"c": "no such folder"}, 7, [3, 4], None, 0, 9, [EngineState(0, "loading")]),
    StartEngine(CONFIG, MODELS[1:], True, ["a", "b"], 7, 0, "cpu", "/tmp/e", 9, 2),
    LoadModel(MODELS[1]),
    Progress("loading the weights"),
    Progress("running its first batches", 1),
    ModelReady(1, INFO),
    ModelFailed(0, "no weights"),
    Ready(),
    Failed("no such model"),
    Drain(),
]


Ends = tuple[ControlConnection, ControlConnection]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ControlConnection(ours), ControlConnection(theirs)


def test_every_message_arrives_as_it_was_sent(ends: Ends) -> None:
    ours, theirs = ends
    for message in MESSAGES:
        ours.send(message)
    assert [theirs.receive() for _ in MESSAGES] == MESSAGES


def test_drain_gives_whole_messages_only(ends: Ends) -> None:
    ours, theirs = ends
    ours.socket.sendall(b'{"type":"Drain"}\n{"type":"Fai')
    assert list(theirs.drain()) == [Drain()]
    ours.socket.sendall(b'led","message":"x"}\n')
    assert list(theirs.drain()) == [Failed("x")]


def test_the_end_of_the_other_side_is_told_once_all_is_read(ends: Ends) -> None:
    ours, theirs = ends
    ours.send(Failed("last words"))
    ours.socket.close()
    assert theirs.receive() == Failed("last words")
    assert theirs.receive() is None
    assert list(theirs.drain()) == [None]


def test_sending_to_nobody_is_no_error(ends: Ends) -> None:
    ours, theirs = ends
    theirs.socket.close()
    for _ in range(3):
        ours.send(Drain())


def test_what_is_read_together_with_the_first_message_is_not_lost(
    ends: Ends,
) -> None:
    ours, theirs = ends
    ours.send(Ready())
    ours.send(Drain())
    assert theirs.receive() == Ready()
    ours.send(Failed("x"))
    assert list(theirs.drain()) == [Drain(), Failed("x")]


def test_messages_between_processes() -> None:
    submit = Submit([EncodeRequest(1, 1, b"\1\0\0\0", b"\1\0\0\0", b"", 0, True, 1.5, 0.5)], [7])
    assert decode_submit(encode(submit)) == submit
    parts = [
        PartialResult(1, 0, 2, [TaskRows(1, b"\0" * 8)], 0.1, 0.2),
        PartialResult(2, 0, 0, [], 0.0, 0.0, "backend", "why"),
    ]
    rows = TextRows(1, b"\0" * 12, [3, 4], [0, 5], [1, 2], 0.1, 0.3)
    results = Results(EngineStatus(0, 1.0, 5, [100.0, 0.0]), parts, rows)
    assert decode_results(encode(results)) == results
