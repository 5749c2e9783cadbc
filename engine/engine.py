"""Texts in, vectors out, in one process: the shortest way to use this package, and what `embert embed` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from embert.engine.encoders.base import Encoder
from embert.engine.encoders.load import load_encoder
from embert.engine.errors import InputError
from embert.engine.forwards import forwards
from embert.engine.heads.multi_vector import kept_rows
from embert.engine.model import Model, load_model
from embert.engine.packing import cumulative
from embert.engine.rows import SparseVector
from embert.engine.tasks import Task, task_names
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

        Raises InputError for a model that does not embed, for an unknown prompt, for dimensions outside 1 … width, for
        a text that is not valid Unicode, or too long while `truncate` is false; EncoderError if a forward fails.
        """
        if Task.EMBED not in self.model.tasks:
            raise self._missing(Task.EMBED, "texts")
        width = self._width(dimensions)
        encoded = self.tokenizer.encode(texts, truncate=truncate, prompt=self._prompt(prompt_name), param="texts")
        vectors = np.empty((len(texts), width), np.float32)
        for numbers, rows in forwards(
            self.encoder,
            encoded,
            Task.EMBED,
            budget=self._budget(batch_tokens),
            dimensions=width if dimensions else 0,
            normalize=normalize,
            progress=progress,
        ):
            vectors[numbers] = rows[Task.EMBED].values[:, :width]
        return vectors

    def embed_iter(self, texts: Iterable[str], *, window: int = WINDOW_TEXTS, **options: object) -> Iterator[Vectors]:
        """As `embed` for any number of texts: yield blocks of at most `window` rows, in order, one at a time."""
        source = iter(texts)
        while block := list(islice(source, window)):
            yield self.embed(block, **options)  # type: ignore[arg-type]  # the options are embed's own

    def embed_sparse(
        self,
        texts: Sequence[str],
        *,
        prompt_name: str | None = None,
        truncate: bool = True,
        batch_tokens: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[SparseVector]:
        """Sparse vectors of texts: weights of tokens of the vocabulary, in the order of the texts.

        The options are those of `embed`. Raises InputError for a model that has no sparse vectors, and as `embed` does.
        """
        if Task.SPARSE not in self.model.tasks:
            raise self._missing(Task.SPARSE, "texts")
        encoded = self.tokenizer.encode(texts, truncate=truncate, prompt=self._prompt(prompt_name), param="texts")
        vectors: dict[int, SparseVector] = {}
        for numbers, rows in forwards(
            self.encoder, encoded, Task.SPARSE, budget=self._budget(batch_tokens), progress=progress
        ):
            vectors.update(zip(numbers.tolist(), rows[Task.SPARSE].sparse_vectors(), strict=True))
        return [vectors[number] for number in range(len(texts))]

    def embed_multi(
        self,
        texts: Sequence[str],
        *,
        is_query: bool = False,
        prompt_name: str | None = None,
        truncate: bool = True,
        batch_tokens: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Vectors]:
        """Vectors of the tokens of texts, each of length 1: float32 [vectors, columns] for each text, in their order.

        Queries and documents (`is_query`) differ in their prompts, their lengths, and the tokens that have a vector.
        `prompt_name` names another of the model's prompts. The other options are those of `embed`. Raises InputError
        for a model that has no multi-vectors, and as `embed` does.
        """
        head = self.model.heads.multi_vector
        if head is None:
            raise self._missing(Task.MULTI, "texts")
        prompt = head.role(is_query).prompt if prompt_name is None else self._prompt(prompt_name)
        encoded = self.tokenizer.encode(texts, truncate=truncate, prompt=prompt, param="texts", is_query=is_query)
        starts = cumulative(encoded.lengths)
        kept = kept_rows(encoded.ids, starts, head, is_query=is_query)
        vectors: dict[int, Vectors] = {}
        for numbers, rows in forwards(
            self.encoder, encoded, Task.MULTI, budget=self._budget(batch_tokens), progress=progress
        ):
            every = rows[Task.MULTI]
            for number, start, stop in zip(numbers.tolist(), every.offsets, every.offsets[1:], strict=False):
                vectors[number] = every.values[start:stop][kept[starts[number] : starts[number + 1]]]
        return [vectors[number] for number in range(len(texts))]

    def _missing(self, task: Task, param: str) -> InputError:
        """The error for a task that the model does not have."""
        (missing,), has = task_names(task), ", ".join(task_names(self.model.tasks))
        return InputError(
            f"`{param}`: {self.model.model_id} does not have the task {missing}; it has {has}", param=param
        )

    def _budget(self, batch_tokens: int | None) -> int:
        """Tokens of a batch: as asked, but no more than the encoder takes, and room for the longest text."""
        most = self.encoder.max_batch_tokens
        return max(min(batch_tokens or most, most), self.model.max_input_length)

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
