"""The CPU encoder: packed, in float32 or, with the products of layers, int8.

A batch is cut, between sequences, into runs (runs.py). Each run goes through all layers on one thread, so threads never
wait for each other inside a layer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embert.engine.batch import PackedBatch, TaskOutput
from embert.engine.encoders.base import Encoder, shared_tasks
from embert.engine.encoders.cpu.heads import ONE_ROW, Hidden, load_heads, one_row_each
from embert.engine.encoders.cpu.kernels import instruction_set, kernels_name
from embert.engine.encoders.cpu.operators import KernelOperators, Operators
from embert.engine.encoders.cpu.runs import (
    MIN_RUN_TOKENS,
    Group,
    Run,
    allow_threads,
    assign_runs,
    cut_into_runs,
)
from embert.engine.encoders.cpu.transformer import Transformer
from embert.engine.encoders.positions import padding_positions
from embert.engine.errors import EncoderError, UnsupportedModel
from embert.engine.heads.description import LabelDecider, MarkerDecider
from embert.engine.heads.embedding import EmbeddingHead
from embert.engine.heads.late_interaction import Scoring, attended_tokens
from embert.engine.host import cpu_name, keep_freed_memory, usable_cores, usable_cpus
from embert.engine.model import Model
from embert.engine.tasks import ALL_TASKS, NO_SHARING, Sharing, Task
from embert.engine.weights.checkpoint import Checkpoint

# On a CPU a larger batch gives no more tokens a second, only a longer wait. A longer text gets its own batch.
MAX_BATCH_TOKENS = 2048

# Threads for a batch of fewer than MIN_RUN_TOKENS tokens: each reads a part of the weights. The kernels give a thread
# little work, and do not wait for one that has not started.
FEW_TOKENS_THREADS = 16

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ticket:
    """A submitted batch, copied. Sequences are sorted by run and then by length, and tokens are in that order."""

    wanted: Task  # by any sequence
    tasks: npt.NDArray[np.uint8]  # [B] in that order
    order: Ints  # [B] sequence numbers, in that order
    lengths: Ints  # [B] in that order
    runs: Ints | None  # [B] in that order: numbers of runs; None: all are one
    attended: Ints | None  # [B] in that order: tokens that are attended to, where those are not all
    tokens: Ints  # [T] where each token came from
    ids: Ints  # [T]
    positions: Ints  # [T] rows of the position table
    token_types: Ints | None  # [T]
    adapters: Ints | None  # [T]: of the token's sequence, -1: none
    dimensions: npt.NDArray[np.int32] | None  # [B] in the order submitted
    normalize: npt.NDArray[np.bool_] | None  # [B] likewise
    prompt_tokens: Ints | None  # [B] in that order: first ones of each sequence, that are not pooled
    prefixes: Ints | None = None  # [B, 2] of PackedBatch; then sequences are sorted by prefix, and then by length
    scoring: Scoring | None = None  # where it is set, all sequences request MULTI

    def mask_of(self, task: Task) -> npt.NDArray[np.bool_]:
        """Mask of the sequences that want a task: [B], in their order."""
        wants: npt.NDArray[np.bool_] = (self.tasks & np.uint8(task)) != 0
        return wants


class CpuEncoder(Encoder):
    """Encoder on a CPU. `submit` only sorts and copies; `wait` does the work."""

    name = "cpu"
    device = "cpu"
    choice = ""
    dtypes: tuple[str, ...] = ("float32", "int8")
    few_tokens_threads = FEW_TOKENS_THREADS
    shares_kernels = True  # threads divide well what lies between two products of a run
    has_prefixes = True  # attention reads keys from two sequences

    def __init__(
        self, model: Model, *, device: str = "cpu", dtype: str = "auto", max_batch_tokens: int | None = None
    ) -> None:
        """Read the model's weights.

        Raises UnsupportedModel for another device or dtype, for a CPU without kernels, and for int8 where it does not
        fit, BrokenModel.
        """
        if device != "cpu":
            raise UnsupportedModel(f"the {self.name} encoder runs on device cpu, not {device}")
        self.dtype = "float32" if dtype == "auto" else dtype
        if self.dtype not in self.dtypes:
            raise UnsupportedModel(
                f"dtype {dtype} is not supported on a CPU by the {self.name} encoder; "
                f"supported: {', '.join(self.dtypes)}"
            )
        self._threads = usable_cores()
        operators = self._operators()
        self.device_name = cpu_name()
        self.width = model.width
        self.hidden_size = model.config.hidden_size
        self._budget = max_batch_tokens or MAX_BATCH_TOKENS
        self.max_batch_tokens = max(self._budget, model.undivided_tokens)
        self._config = model.config
        self._position_padding_id = model.config.padding_id
        self._has = model.tasks
        self._adapters = 0 if model.config.adapters is None else len(model.config.adapters.names)
        # Task → the pooling by which it reads one row of a sequence; tasks that are absent here read all rows.
        classifier = model.heads.classifier
        self._reads, decider = model.poolings, model.heads.decider
        if isinstance(decider, LabelDecider):
            self._has |= Task.LABEL_MASS
        self._types_of_questions = isinstance(decider, MarkerDecider)  # are what token types mean, to the head only
        self._padding_id = None if classifier is None else classifier.padding_id
        self.sharing = Sharing(shared_tasks(model), self._padding_id) if self.has_prefixes else NO_SHARING
        head = model.heads.multi_vector
        self._unattended = None if head is None else head.unattended
        self._scores = model.late_interaction
        keep_freed_memory()
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="embert-forward")
        checkpoint = Checkpoint.open(model)
        self._transformer = Transformer(model.config, checkpoint, operators)
        self._heads = load_heads(model, checkpoint, operators)
        self._embedding = EmbeddingHead(model.folder, model.after_pooling, linear=operators.head_linear)

    def _operators(self) -> Operators:
        if instruction_set() is None:
            raise UnsupportedModel(
                f"{self.dtype} on the cpu encoder needs embert's kernels for CPUs with AVX2 or NEON, which this CPU or "
                "installation lacks; --encoder torch runs float32 and bfloat16 without them"
            )
        cpus = f"{usable_cpus()} of {os.cpu_count()}"
        self.choice = f"{kernels_name()} kernels, threads: {self._threads}, usable CPUs: {cpus}"
        return KernelOperators(int8=self.dtype == "int8")

    @property
    def batch_tokens(self) -> int:
        return min(self.max_batch_tokens, self._budget)

    def _one_row(self, tasks: Task) -> str | None:
        """The only row of a sequence that these tasks read, "cls" or "last-token"; None if they read more."""
        rows = {self._reads.get(task) for task in tasks}
        return next((row for row in ONE_ROW if rows == {row}), None)

    def _threads_for(self, tokens: int) -> int:
        """Threads for a batch of one run."""
        return self._threads if tokens >= MIN_RUN_TOKENS else min(self.few_tokens_threads, self._threads)

    def submit(self, batch: PackedBatch) -> Ticket:
        """Take a batch; its arrays may be reused.

        Raises ValueError if it has more than max_batch_tokens tokens, EncoderError for a longer sequence than the
        model has positions, and for dimensions, tasks or adapters that it does not have.
        """
        if batch.tokens > self.max_batch_tokens:
            raise ValueError(
                f"a batch of {batch.tokens} tokens is over this encoder's limit of {self.max_batch_tokens}"
            )
        batch.check(self._has, self.width, self._adapters, self.sharing.tasks)
        scoring = Scoring.of(batch, self._scores)
        if scoring is not None:
            batch = batch.with_tasks(Task.MULTI)
        starts = batch.cu_seqlens[:-1].astype(np.int64)
        lengths = np.diff(batch.cu_seqlens).astype(np.int64)
        whole = lengths if batch.prefixes is None else lengths + batch.prefixes[:, 1]
        longest, most = int(whole.max(initial=0)), self._config.max_positions
        if longest > most:
            raise EncoderError(f"a sequence of {longest} tokens is longer than the model's {most} positions")
        attended = attended_tokens(batch, self._unattended)
        runs = None
        if batch.prefixes is None:
            runs = assign_runs(lengths, self._threads, self.hidden_size, shares_kernels=self.shares_kernels)
        order = np.lexsort([key for key in (attended, lengths, runs) if key is not None])
        if batch.prefixes is not None:
            owners, shared = batch.prefixes.T
            order = order[np.argsort(np.where(shared, owners, -1)[order], kind="stable")]
        tokens = positions = np.arange(batch.tokens)
        if len(order) > 1:
            lengths = lengths[order]
            positions = positions - np.repeat(np.cumsum(lengths) - lengths, lengths)
            tokens = np.repeat(starts[order], lengths) + positions
        prefixes = None
        if batch.prefixes is not None:
            prefixes = np.stack([np.argsort(order)[owners], shared], 1)[order] * (shared[order] > 0)[:, None]
            positions = positions + np.repeat(prefixes[:, 1], lengths)
        around = None
        if self._position_padding_id is not None:
            padding_row = self._config.max_positions
            around = padding_positions(batch.ids, batch.cu_seqlens, self._position_padding_id, padding_row)
        return Ticket(
            wanted=batch.wanted,
            tasks=np.full(len(order), Task.EMBED, np.uint8) if batch.tasks is None else batch.tasks[order],
            order=order,
            lengths=lengths,
            runs=None if runs is None else runs[order],
            attended=None if attended is None else attended[order].astype(np.int64),
            tokens=tokens,
            ids=batch.ids[tokens].astype(np.int64),
            positions=positions if around is None else around[tokens].astype(np.int64),
            token_types=None if batch.token_types is None else batch.token_types[tokens].astype(np.int64),
            adapters=None if batch.adapters is None else np.repeat(batch.adapters[order].astype(np.int64), lengths),
            dimensions=None if batch.dimensions is None else batch.dimensions.copy(),
            normalize=None if batch.normalize is None else batch.normalize.copy(),
            prompt_tokens=None if batch.prompt_tokens is None else batch.prompt_tokens[order].astype(np.int64),
            prefixes=prefixes,
            scoring=scoring,
        )

    def wait(self, ticket: Ticket) -> dict[Task, TaskOutput]:
        try:
            rows = self._forward(ticket)
            return rows if ticket.scoring is None else ticket.scoring.finish(rows)
        except Exception as error:
            longest = int(ticket.lengths.max(initial=0))
            raise EncoderError(
                f"the forward of {len(ticket.lengths)} sequences, {len(ticket.ids)} tokens, longest {longest}, "
                f"{self.dtype}, failed: {error}"
            ) from error

    def close(self) -> None:
        self._pool.shutdown()
        del self._transformer, self._heads, self._embedding

    def _forward(self, ticket: Ticket) -> dict[Task, TaskOutput]:
        runs = list(cut_into_runs(ticket.lengths, ticket.attended, ticket.runs, ticket.prefixes))
        if len(runs) <= 1:
            allow_threads(self._threads_for(len(ticket.ids)))
            parts = [self._run(ticket, run) for run in runs]
        else:
            # Each run has its own thread of the pool, which allows it no more.
            running = [self._pool.submit(self._run, ticket, run) for run in runs]
            wait(running)
            allow_threads(self._threads)  # for what follows the pooling
            parts = [one.result() for one in running]
        return {task: self._rows(task, parts, ticket) for task in ALL_TASKS if task in ticket.wanted}

    def _rows(self, task: Task, parts: Sequence[Mapping[Task, TaskOutput]], ticket: Ticket) -> TaskOutput:
        """The rows of the sequences that want a task, in the order submitted, from those of the runs."""
        order = ticket.order[ticket.mask_of(task)]
        of_runs = [part[task] for part in parts if task in part]
        if not of_runs:  # a batch without sequences wants EMBED
            return TaskOutput.one_each(np.empty((0, self.width), np.float32))
        rows = TaskOutput.concatenate(of_runs)
        if len(order) > 1:
            rows = rows.take(np.argsort(order))
        if task != Task.EMBED:
            return rows
        sequences = np.sort(order)
        dimensions = None if ticket.dimensions is None else ticket.dimensions[sequences]
        normalize = None if ticket.normalize is None else ticket.normalize[sequences]
        return TaskOutput.one_each(self._embedding(rows.values, dimensions, normalize))

    def _run(self, ticket: Ticket, run: Run) -> dict[Task, TaskOutput]:
        """Take one run through the layers and the heads: the rows of each task, in the run's order."""
        ids, groups = ticket.ids[run.tokens], run.groups
        tasks = Task(int(np.bitwise_or.reduce(ticket.tasks[run.sequences])))
        one_row = self._one_row(tasks)
        token_types = None if ticket.token_types is None else ticket.token_types[run.tokens]
        last_rows = one_row_each(groups, one_row) if one_row else None
        if last_rows is not None and Task.CLASSIFY in tasks and (ids[last_rows] == self._padding_id).any():
            last_rows = None  # the classifier takes an earlier row
        rows = self._transformer(
            ids,
            ticket.positions[run.tokens],
            None if self._types_of_questions else token_types,
            None if ticket.adapters is None else ticket.adapters[run.tokens],
            groups,
            last_rows,
        )
        if last_rows is not None:  # as if each sequence had one token
            ids, groups = ids[last_rows], [Group(0, len(last_rows), 1)]
        prompt_tokens = None if ticket.prompt_tokens is None else ticket.prompt_tokens[run.sequences]
        hidden = Hidden(rows, ids, groups, prompt_tokens, token_types)
        return {
            task: head(hidden.of(ticket.mask_of(task)[run.sequences]))
            for task, head in self._heads.items()
            if task in tasks
        }
