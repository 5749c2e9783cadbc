"""The CPU encoder: packed, in float32 or bfloat16. Also the reference that others are compared with.

A batch is cut, between sequences, into runs that go through all layers by themselves, one thread each. So threads
never wait for each other within a layer, as they do in torch's own parallel loops: with other processes on the same
cores such a loop was seen to take 200 times as long, because its threads spin for one that is not scheduled.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

# A batch of one sequence uses torch's loops. Their threads shall spin for the microseconds between two loops, and no
# longer: without (0) a second core gained nothing, with the default they took the cores from everybody, each other
# included, and one text beside another busy process took 460 ms instead of 4. Read as torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import torch

from embert.engine.checkpoint import Checkpoint
from embert.engine.encoders.base import PackedBatch, Task, check_dimensions
from embert.engine.encoders.padding_positions import padding_positions
from embert.engine.encoders.torch_bert import Bert, Group
from embert.engine.encoders.torch_linear import kernel_rows, limit_kernel_caches, row_counts
from embert.engine.errors import EncoderError, UnsupportedModel
from embert.engine.heads import Heads
from embert.engine.model import Model
from embert.engine.packing import cumulative

__all__ = ["TorchEncoder"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# A larger batch gives no more tokens a second on a CPU, only a longer wait.
MAX_BATCH_TOKENS = 2048

# Tokens of a run: at most so many, which is enough for full speed of the matrix products and keeps what lies between
# two of them in the last-level cache; and at least so many, below which weights cost more to read than a thread gains.
MAX_RUN_TOKENS = 512
MIN_RUN_TOKENS = 48
# Threads of torch's loops for a batch of fewer tokens than that: each reads a part of the weights. On two cores of a
# Xeon one query in flight took 6.9 ms instead of 10.6, four 13.5 instead of 18.9; but beside a process that kept one of
# the cores busy 15 instead of 9.6. Two is as many as were measured.
FEW_TOKENS_THREADS = 2

# Kernels for more rows than this are made when they are needed: their caches hold no more (limit_kernel_caches).
MAX_PREPARED_ROWS = 1024
# Attention's kernels for longer texts likewise: there is one for every 16 tokens, and trying each takes the square of
# its length: a model of 8 192 tokens and 64 columns was not ready after a minute.
MAX_PREPARED_LENGTH = 512

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Ticket:
    """A submitted batch, copied: sequences sorted by length, tokens in that order."""

    task: Task
    order: Ints  # [B] sequence numbers, shortest first
    lengths: Ints  # [B] in that order
    tokens: Ints  # [T] where each token came from
    ids: Ints  # [T]
    positions: Ints  # [T] rows of the position table
    token_types: Ints | None  # [T]
    dimensions: npt.NDArray[np.int32] | None  # [B] in the order submitted
    normalize: npt.NDArray[np.bool_] | None  # [B] likewise


class TorchEncoder:
    """See embert.engine.encoders.base.Encoder. `submit` only sorts and copies; the work is done by `wait`."""

    name = "torch"
    device = "cpu"
    choice = ""

    def __init__(
        self, model: Model, *, device: str = "cpu", dtype: str = "auto", max_batch_tokens: int | None = None
    ) -> None:
        """Read the model's weights. Raises UnsupportedModel for another device or dtype, BrokenModel."""
        if device != "cpu":
            raise UnsupportedModel(f"the torch encoder runs on device cpu, not {device}")
        self.dtype = "float32" if dtype == "auto" else dtype
        if self.dtype not in DTYPES:
            raise UnsupportedModel(
                f"dtype {dtype} is not supported on a CPU, which has no fast {dtype} products; "
                f"supported: {', '.join(DTYPES)}"
            )
        self.device_name = _cpu_name()
        self.width = model.width
        self.hidden_size = model.config.hidden_size
        self.max_batch_tokens = max_batch_tokens or max(MAX_BATCH_TOKENS, model.max_input_length)
        self._config = model.config
        self._pooling = model.pooling
        self._pools_one_row = model.pooling in ("cls", "last-token")
        limit_kernel_caches()
        _keep_freed_memory()
        # Never more threads than this process may use CPUs; torch's own default heeds OMP_NUM_THREADS.
        self._threads = min(torch.get_num_threads(), len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(
            self._threads, thread_name_prefix="embert-forward", initializer=torch.set_num_threads, initargs=(1,)
        )
        checkpoint = Checkpoint.open(model)
        with torch.inference_mode():
            self._bert = Bert(model.config, checkpoint, DTYPES[self.dtype])
        self._heads = Heads(model)
        if self._bert.packed:
            self._prepare(model.max_input_length)

    def _prepare(self, longest: int) -> None:
        """Make every kernel that runs can need: memory does not grow later, and no client waits for it.

        But for attention in texts of over MAX_PREPARED_LENGTH tokens.
        """
        longest = min(longest, MAX_PREPARED_LENGTH)
        most = min(self.max_batch_tokens, MAX_RUN_TOKENS + longest, MAX_PREPARED_ROWS)
        for _ in self._pool.map(self._bert.prepare, row_counts(most)):
            pass
        self._pool.submit(self._bert.prepare_attention, longest).result()
        if self._threads > 1:  # a batch of one run has kernels for several threads
            torch.set_num_threads(self._threads)
            self._bert.prepare_attention(longest)
            for rows in row_counts(min(max(2 * MIN_RUN_TOKENS, longest), most)):
                # Few rows that are pooled may be left of many: multiplied by as many threads as all of them.
                for threads in {self._threads_for(rows)} | ({self._threads} if self._pools_one_row else set()):
                    torch.set_num_threads(threads)
                    self._bert.prepare(rows)
            torch.set_num_threads(self._threads)

    def _threads_for(self, tokens: int) -> int:
        """Threads of torch's loops for a batch of one run."""
        return self._threads if kernel_rows(tokens) >= MIN_RUN_TOKENS else min(FEW_TOKENS_THREADS, self._threads)

    def submit(self, batch: PackedBatch, task: Task = Task.EMBED) -> _Ticket:
        """Take a batch; its arrays may be reused.

        Raises ValueError when it has more than max_batch_tokens tokens, EncoderError for dimensions it cannot have.
        """
        if batch.tokens > self.max_batch_tokens:
            raise ValueError(
                f"a batch of {batch.tokens} tokens is over this encoder's limit of {self.max_batch_tokens}"
            )
        check_dimensions(batch, self.width)
        starts = batch.cu_seqlens[:-1].astype(np.int64)
        lengths = np.diff(batch.cu_seqlens).astype(np.int64)
        order = np.argsort(lengths, kind="stable")
        lengths = lengths[order]
        sorted_starts = np.cumsum(lengths) - lengths
        positions = np.arange(batch.tokens) - np.repeat(sorted_starts, lengths)
        tokens = np.repeat(starts[order], lengths) + positions
        config = self._config
        around = padding_positions(batch.ids, batch.cu_seqlens, config.padding_id, config.max_positions)
        return _Ticket(
            task=task,
            order=order,
            lengths=lengths,
            tokens=tokens,
            ids=batch.ids[tokens].astype(np.int64),
            positions=positions if around is None else around[tokens].astype(np.int64),
            token_types=None if batch.token_types is None else batch.token_types[tokens].astype(np.int64),
            dimensions=None if batch.dimensions is None else batch.dimensions.copy(),
            normalize=None if batch.normalize is None else batch.normalize.copy(),
        )

    def wait(self, ticket: _Ticket) -> npt.NDArray[np.float32]:
        """Run the forward; see Encoder.wait."""
        try:
            return self._forward(ticket)
        except Exception as error:
            longest = int(ticket.lengths.max(initial=0))
            raise EncoderError(
                f"the forward of {len(ticket.lengths)} sequences, {len(ticket.ids)} tokens, longest {longest}, "
                f"{self.dtype}, failed: {error}"
            ) from error

    def encode(self, batch: PackedBatch, task: Task = Task.EMBED) -> npt.NDArray[np.float32]:
        """Submit and wait."""
        return self.wait(self.submit(batch, task))

    def close(self) -> None:
        """End the threads and let go of the weights."""
        self._pool.shutdown()
        del self._bert, self._heads

    def _forward(self, ticket: _Ticket) -> npt.NDArray[np.float32]:
        embed = ticket.task is Task.EMBED
        answer = np.empty((len(ticket.order if embed else ticket.ids), self.hidden_size), np.float32)
        runs = list(_runs(ticket.lengths, self._threads))
        if len(runs) <= 1:
            for run in runs:
                torch.set_num_threads(self._threads_for(len(ticket.ids)))
                self._run(ticket, run, answer)
        else:
            # Each run has its thread, so torch's own must not multiply them.
            torch.set_num_threads(1)
            try:
                # Longest sequences first: the short ones fill the gaps at the end.
                running = [self._pool.submit(self._run, ticket, run, answer) for run in reversed(runs)]
                wait(running)
            finally:
                torch.set_num_threads(self._threads)
            for one in running:
                one.result()
        return self._heads(answer, ticket.dimensions, ticket.normalize) if embed else answer

    def _run(self, ticket: _Ticket, run: _Run, answer: npt.NDArray[np.float32]) -> None:
        """Take one run through the layers and put its rows where they belong."""
        tokens, embed = run.tokens, ticket.task is Task.EMBED
        with torch.inference_mode():  # a thread's own
            hidden = self._bert(
                torch.from_numpy(ticket.ids[tokens]),
                torch.from_numpy(ticket.positions[tokens]),
                None if ticket.token_types is None else torch.from_numpy(ticket.token_types[tokens]),
                run.groups,
                self._pooled_rows(run.groups) if embed and self._pools_one_row else None,
            )
            if not embed:
                answer[ticket.tokens[tokens]] = hidden.float().numpy()
            elif self._pools_one_row:
                answer[ticket.order[run.sequences]] = hidden.float().numpy()
            else:
                pooled = torch.cat([self._pooled(hidden, group) for group in run.groups])
                answer[ticket.order[run.sequences]] = pooled.numpy()

    def _pooled_rows(self, groups: Sequence[Group]) -> torch.Tensor:
        """Int64 [n]: each sequence's first token, or its last."""
        rows = [
            torch.arange(n) * length + start + (0 if self._pooling == "cls" else length - 1)
            for start, n, length in groups
        ]
        return torch.cat(rows)

    def _pooled(self, hidden: torch.Tensor, group: Group) -> torch.Tensor:
        """[T, hidden] → float32 [n, hidden] for a group of n sequences."""
        start, n, length = group
        rows = hidden[start : start + n * length].view(n, length, -1)
        return rows.mean(1, dtype=torch.float32) if self._pooling == "mean" else rows.amax(1).float()


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbours among a ticket's sorted sequences."""

    sequences: slice
    tokens: slice
    groups: list[Group]  # sequences of equal length, counted from the run's first token


def _runs(lengths: Ints, threads: int) -> Iterator[_Run]:
    """Cut sorted sequences [B] into runs of about equal numbers of tokens, a multiple of the threads where possible."""
    if not len(lengths):
        return
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    count = threads * -(-total // (threads * MAX_RUN_TOKENS))
    count = max(1, min(count, total // MIN_RUN_TOKENS))
    # The sequence ends nearest to even shares of the tokens.
    shares = np.arange(1, count) * total / count
    cuts = np.searchsorted(ends - lengths / 2, shares)
    bounds = np.unique(np.concatenate([[0], cuts, [len(lengths)]])).tolist()
    for first, last in itertools.pairwise(bounds):
        sizes, counts = np.unique(lengths[first:last], return_counts=True)
        starts = cumulative((sizes * counts).astype(np.int32))[:-1]
        yield _Run(
            sequences=slice(first, last),
            tokens=slice(int(ends[first] - lengths[first]), int(ends[last - 1])),
            groups=list(zip(starts.tolist(), counts.tolist(), sizes.tolist(), strict=True)),
        )


def _keep_freed_memory() -> None:
    """Ask glibc to keep freed buffers instead of handing them back to the system.

    A forward frees and takes the same few megabytes again and again; with glibc's defaults each time costs their page
    faults, which made attention up to three times slower. All threads share one heap: what one leaves the next can use.
    Other C libraries lack the call or ignore it.
    """
    trim_threshold, mmap_threshold, arena_max, keep_bytes = -1, -3, -8, 256 << 20
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(trim_threshold, keep_bytes)
        mallopt(mmap_threshold, keep_bytes)
        mallopt(arena_max, 1)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
