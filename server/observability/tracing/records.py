"""What the exporting process is told of sampled requests and batches, as msgpack arrays.

Times are seconds of CLOCK_MONOTONIC, which all processes of a machine share. No record holds a text.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "EXPORTER",
    "BatchRecord",
    "ExporterStart",
    "Member",
    "Records",
    "RequestRecord",
    "Stage",
    "decode",
    "encode",
    "encode_record",
]

EXPORTER = "traces"  # the exporting process's name in logs and metrics


class ExporterStart(msgspec.Struct):
    """Supervisor → exporting process, the only message: JSON. It ends when the stream does."""

    url: str  # of the collector
    instance: str  # a name for this server that no other has
    memory_fd: int  # of metrics
    log_format: str
    log_level: str


class Stage(msgspec.Struct, array_like=True):
    """A part of a request's way through an HTTP process."""

    name: str
    started: float
    ended: float
    reason: str = ""  # why it failed; empty: it did not


class RequestRecord(msgspec.Struct, array_like=True, tag="request"):
    """A request that has been answered, or whose client has left."""

    trace_id: bytes  # [16]
    span_id: bytes  # [8]
    parent_id: bytes  # [8]: the caller's span; empty: none
    state: bytes  # the caller's `tracestate`
    method: str
    scheme: str
    route: str  # empty: not one of ours
    path: str  # empty: not one of ours
    status: int  # 499: the client left before the answer
    started: float
    ended: float
    request_id: str
    model: str
    texts: int
    tokens: int
    bulk: bool
    reason: str  # what the answer says where it is an error
    exception: str  # the name of the one that the app raised
    stages: list[Stage]

    @property
    def spans(self) -> int:
        """How many spans it becomes."""
        return 1 + len(self.stages)


class Member(msgspec.Struct, array_like=True):
    """The texts of one sampled request in a batch."""

    context: bytes  # trace id [16], id of the request's span [8], `tracestate`
    texts: int
    tokens: int
    admitted: float  # when the request entered the queue; 0: earlier texts of it have run


class BatchRecord(msgspec.Struct, array_like=True, tag="batch"):
    """A forward with texts of sampled requests."""

    engine: int
    started: float
    ended: float
    texts: int
    tokens: int
    requests: int  # the sampled ones and the others
    reason: str  # why it failed; empty: it did not
    members: list[Member]

    @property
    def spans(self) -> int:
        """How many spans it becomes."""
        return 1 + sum(2 if member.admitted else 1 for member in self.members)


class Records(msgspec.Struct, array_like=True):
    """One message."""

    process: str  # the sender: `api-0`, `engine-1`
    dropped: int  # spans that the sender had no room for, since its last message
    records: list[RequestRecord | BatchRecord]


class _Encoded(msgspec.Struct, array_like=True):
    """The same, with records that are encoded already."""

    process: str
    dropped: int
    records: list[msgspec.Raw]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Records)


def encode_record(record: RequestRecord | BatchRecord) -> bytes:
    """One record to bytes, for `encode`."""
    return _encoder.encode(record)


def encode(process: str, dropped: int, records: list[bytes]) -> bytes:
    """A message to bytes."""
    return _encoder.encode(_Encoded(process, dropped, [msgspec.Raw(record) for record in records]))


def decode(data: bytes | memoryview) -> Records:
    """From bytes. Raises msgspec.MsgspecError for what is no message."""
    return _decoder.decode(data)
