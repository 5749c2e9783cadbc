"""The tokenization and engine processes of a run.

Blocks go from process to process; only the first and the last queue is the parent's.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embert.engine import Model, load_encoder
from embert.engine.errors import EngineError
from embert.server.bulk.job import Block, BulkError, Job, SharedBuffers
from embert.server.bulk.stages import EngineStage, TokenizationStage


@dataclass(frozen=True, slots=True)
class Links:
    """The queues between the processes. A message to a tokenization process has the stage's name and a block.

    The parent receives blocks, what an engine has loaded, and a string from a process that cannot continue.
    """

    tokenizers: Sequence[Any]  # of each process, because it keeps the rows of a block until it formats them
    engines: Any  # of all of them: a block goes to whichever is free next
    results: Any  # sending end of a pipe
    results_lock: Any

    def put(self, message: object) -> None:
        """Send a message to the parent."""
        with self.results_lock:
            self.results.send(message)


def work(job: Job, model: Model, buffers: SharedBuffers, links: Links, role: int | Mapping[str, Any]) -> None:
    """Serve one run in this process, until the parent ends.

    `role` is the number of a tokenization process, or an engine's options of `load_encoder`.
    """
    with contextlib.suppress(OSError):
        os.dup2(2, 1)  # standard output is for vectors
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        if isinstance(role, int):
            _tokenize(TokenizationStage(job, model, buffers), links, role)
        else:
            _encode(job, model, buffers, links, role)
    except (EngineError, BulkError) as error:
        links.put(str(error))
    except MemoryError:
        links.put(f"not enough memory for {model.model_id}")
    except Exception as error:  # noqa: BLE001 - the user gets one sentence for any error
        name = multiprocessing.current_process().name
        links.put(f"internal error in {name}: {type(error).__name__}: {error}")
    os._exit(0)  # without waiting for threads


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(0)


def _tokenize(stage: TokenizationStage, links: Links, number: int) -> None:
    links.put({})
    while True:
        name, block = links.tokenizers[number].get()
        getattr(stage, name)(block)
        if name == "tokenize" and block.texts:
            links.engines.put(block)
        else:
            links.put(block)


def _encode(job: Job, model: Model, buffers: SharedBuffers, links: Links, options: Mapping[str, Any]) -> None:
    encoder = load_encoder(model, **options)
    stage = EngineStage(job, model, encoder, buffers)
    links.put({"encoder": encoder.name, "device": encoder.device.partition(":")[0], "dtype": encoder.dtype})
    # One block finishes, one is encoded, one waits; the others are for whichever engine is free next.
    waiting: queue.Queue[Block] = queue.Queue(1)
    threading.Thread(target=_receive, args=(links, waiting), daemon=True).start()
    for block in stage.encode(_blocks(waiting)):
        links.tokenizers[block.tokenizer].put(("format", block))


def _receive(links: Links, waiting: queue.Queue[Block]) -> None:
    while True:
        waiting.put(links.engines.get())


def _blocks(waiting: queue.Queue[Block]) -> Iterator[Block | None]:
    while True:
        if waiting.empty():
            yield None
        yield waiting.get()
