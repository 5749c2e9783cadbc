"""Texts in, vectors out, in one process: the shortest way to use this package, and what `embert embed` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from embert.engine.encoders.base import Encoder
from embert.engine.encoders.load import load_encoder
from embert.engine.errors import InputError
from embert.engine.model import Model, load_model
from embert.engine.packing import PackedBatch, cumulative
from embert.engine.tasks import Task
from embert.engine.tokenization.encoded import Encoded
from embert.engine.tokenization.tokenizer import Tokenizer

__all__ = ["Engine"]

Vectors = npt.NDArray[np.float32]

# Texts that embed_iter sorts by length: enough that the texts of a batch are of nearly the same length.
WINDOW_TEXTS = 4096


class Engine:
    """A model, its tokenizer and its encoder."""

    def __init__(self, model: Model, tokenizer: Tokenizer, encoder: Encoder) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.encoder = encoder

    @classmethod
    def load(
        cls,
        model: str | Model | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        revision: str | None = None,
        pooling: str | None = None,
        max_batch_tokens: int | None = None,
        encoder: str = "auto",
        progress: bool = False,
    ) -> Engine:
        """Load everything. The arguments and the errors are those of `load_model` and `load_encoder`."""
        if not isinstance(model, Model):
            model = load_model(model, revision=revision, pooling=pooling, progress=progress)
        tokenizer = Tokenizer(model)
        return cls(
            model,
            tokenizer,
            load_encoder(model, device=device, dtype=dtype, max_batch_tokens=max_batch_tokens, encoder=encoder),
        )

    def close(self) -> None:
        """Close the encoder."""
        self.encoder.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def embed(
        self,
        texts: Sequence[str],
        *,
        prompt_name: str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        truncate: bool = True,
        batch_tokens: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Vectors:
        """Embed texts: float32 [n, dimensions or width], rows in the order of the texts.

        `prompt_name` names one of the model's prompts; None uses the model's default prompt, if it has one.
        `normalize` gives rows of length 1. `dimensions` keeps that many columns of each row, before normalising.
        `batch_tokens` bounds the tokens of a forward; None is the encoder's own bound. `progress` is called after each
        batch with the number of its texts.

        Raises InputError for an unknown prompt, for dimensions outside 1 … width, for a text that is not valid Unicode,
        or too long while `truncate` is false; EncoderError if a forward fails.
        """
        width = self._width(dimensions)
        encoded = self.tokenizer.encode(texts, truncate=truncate, prompt=self._prompt(prompt_name), param="texts")
        budget = min(batch_tokens or self.encoder.max_batch_tokens, self.encoder.max_batch_tokens)
        budget = max(budget, self.model.max_input_length)
        vectors = np.empty((len(texts), width), np.float32)
        in_flight: tuple[npt.NDArray[np.intp], object] | None = None

        def collect(rows: npt.NDArray[np.intp], ticket: object) -> None:
            vectors[rows] = self.encoder.wait(ticket)[Task.EMBED].values[:, :width]
            if progress is not None:
                progress(len(rows))

        for rows, batch in _batches(encoded, budget, width if dimensions else 0, normalize):
            ticket = self.encoder.submit(batch)
            # Submit the next batch before waiting for the last one, so that the device is never idle.
            if in_flight is not None:
                collect(*in_flight)
            in_flight = rows, ticket
        if in_flight is not None:
            collect(*in_flight)
        return vectors

    def embed_iter(self, texts: Iterable[str], *, window: int = WINDOW_TEXTS, **options: object) -> Iterator[Vectors]:
        """As `embed` for any number of texts: yield blocks of at most `window` rows, in order, one at a time."""
        source = iter(texts)
        while block := list(islice(source, window)):
            yield self.embed(block, **options)  # type: ignore[arg-type]  # the options are embed's own

    def _width(self, dimensions: int | None) -> int:
        width = self.model.width
        if dimensions is not None and not 1 <= dimensions <= width:
            raise InputError(f"`dimensions` must be from 1 to {width}, found {dimensions}", param="dimensions")
        return dimensions or width

    def _prompt(self, name: str | None) -> str:
        name = name if name is not None else self.model.default_prompt_name
        if name is None:
            return ""
        if name not in self.model.prompts:
            known = ", ".join(self.model.prompts) or "none"
            raise InputError(f"`prompt_name` {name!r} is not known; this model's prompts: {known}", param="prompt_name")
        return self.model.prompts[name]


def _batches(
    encoded: Encoded, budget: int, dimensions: int, normalize: bool
) -> Iterator[tuple[npt.NDArray[np.intp], PackedBatch]]:
    """Yield batches of at most `budget` tokens, longest texts first, each with the numbers of its texts."""
    starts = cumulative(encoded.lengths)
    # Longest first: the largest allocations come first, and a progress bar speeds up instead of slowing down.
    order = np.argsort(-encoded.lengths, kind="stable")
    ends = np.cumsum(encoded.lengths[order])
    first = 0
    while first < len(order):
        spent = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, spent + budget, side="right")))
        rows = order[first:last]
        yield (
            rows,
            PackedBatch(
                ids=np.concatenate([encoded.ids[starts[row] : starts[row + 1]] for row in rows]),
                cu_seqlens=cumulative(encoded.lengths[rows]),
                dimensions=np.full(len(rows), dimensions, np.int32) if dimensions else None,
                normalize=np.full(len(rows), normalize, np.bool_),
            ),
        )
        first = last
