"""The in-process API: texts in, vectors or scores out. `embert`'s commands use it too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypedDict, Unpack, cast

import numpy as np
import numpy.typing as npt

from embert.engine.batch import SparseVector, TaskOutput, cumulative
from embert.engine.decisions import (
    Decision,
    Question,
    check_questions,
    decision_tasks,
    read_decisions,
    second_texts,
)
from embert.engine.encode_batches import encode_batches, run_batches, score_batches
from embert.engine.encoders.base import Encoder, check_finite
from embert.engine.entities import DEFAULT_IGNORED, STRATEGIES, Aggregation, Entity, EntityOptions, entities_of
from embert.engine.errors import InputError
from embert.engine.heads.description import Classifier, MultiVector, TokenClassifier
from embert.engine.heads.late_interaction import multi_vector_mask, pool
from embert.engine.heads.scores import LabelScore, Ranked, best_labels, rank, scores
from embert.engine.heads.zero_shot import TEMPLATE, check_labels, hypotheses, zero_shot_labels
from embert.engine.loader import load_encoder
from embert.engine.model import Model, load_model
from embert.engine.options import (
    check_instruction_tokens,
    check_pair_instruction,
    output_width,
    require_tasks,
    resolve_options,
)
from embert.engine.quantization import MIN_ACCURACY
from embert.engine.tasks import Task
from embert.engine.tokenization.encoded import Encoded, TokenizeOptions, check_sequence, check_text, check_texts
from embert.engine.tokenization.tokenizer import Tokenizer

Vectors = npt.NDArray[np.float32]
Pair = tuple[str, str]

# Texts that embed_iter sorts by length: enough that the texts of a batch are of nearly the same length.
WINDOW_TEXTS = 4096


class ForwardOptions(TypedDict, total=False):
    """Options of all methods of `Engine`, which `Engine.embed` describes."""

    batch_tokens: int | None
    progress: Callable[[int], None] | None


class TextOptions(ForwardOptions, total=False):
    """Options of `Engine.embed_sparse` and `Engine.embed_multi`, which `Engine.embed` describes."""

    task: str | None
    prompt_name: str | None
    instruction: str | None
    truncate: bool  # True by default


class ScoreOptions(ForwardOptions, total=False):
    """Options of `Engine.classify` and `Engine.zero_shot`."""

    raw: bool  # the model's logits instead of scores; False by default
    prompt_name: str | None  # goes before a text, of a pair before the first
    truncate: bool  # True by default


class PairOptions(ScoreOptions, total=False):
    """Options of `Engine.score` and `Engine.rerank`."""

    instruction: str | None  # in place of that of a reranker's chat template


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
        min_agreement: float = MIN_ACCURACY,
        progress: bool = False,
    ) -> Engine:
        """Load everything. The arguments and the errors are those of `load_model` and `load_encoder`."""
        if not isinstance(model, Model):
            model = load_model(model, revision=revision, pooling=pooling, progress=progress)
        tokenizer = Tokenizer(model)
        return cls(
            model,
            tokenizer,
            load_encoder(
                model,
                device=device,
                dtype=dtype,
                max_batch_tokens=max_batch_tokens,
                encoder=encoder,
                min_agreement=min_agreement,
            ),
        )

    def close(self) -> None:
        """Release the encoder's threads and memory."""
        self.encoder.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def embed(
        self,
        texts: Sequence[str],
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        **options: Unpack[TextOptions],
    ) -> Vectors:
        """Embed texts: float32 [n, dimensions or width], rows in the order of the texts.

        `task` names one of the model's adapters, and its prompt; None uses the model's own weights. `prompt_name` names
        one of the model's prompts, and the adapter of that name; None uses the model's default prompt, if it has one.
        Where both are given, the prompt is the second one's. `instruction` replaces that in the model's prompt of
        queries, which precedes the texts. `normalize` gives rows of length 1. `dimensions` keeps that many columns of
        each row, before normalizing. `batch_tokens` bounds the tokens of a forward; None is the encoder's own bound.
        `progress` is called after each batch with the number of its texts.

        Raises InputError for a model that does not embed, for `texts` that are not a list of strings, for an unknown
        task or prompt, for an instruction that the model does not read or that leaves no token for a text, for
        dimensions outside 1 … width, for a text that is not valid Unicode, or too long while `truncate` is false;
        EncoderError if a forward fails or a vector is not finite.
        """
        require_tasks(self.model, Task.EMBED)
        _check_flags(normalize=normalize)
        width = output_width(self.model, dimensions)
        encoded = self._encode(texts, options)
        vectors = np.empty((len(texts), width), np.float32)
        for numbers, rows in self._rows(
            encoded, Task.EMBED, options, dimensions=width if dimensions else 0, normalize=normalize
        ):
            vectors[numbers] = rows.values[:, :width]
        return vectors

    def embed_iter(self, texts: Iterable[str], *, window: int = WINDOW_TEXTS, **options: object) -> Iterator[Vectors]:
        """Embed any number of texts: yield blocks of at most `window` rows, in order, one at a time."""
        if isinstance(texts, (str, bytes)):
            check_sequence(texts, "texts")
        if type(window) is not int or window < 1:
            raise InputError(f"must be at least 1, found {window!r}", param="window")
        source = iter(texts)
        while block := list(islice(source, window)):
            yield self.embed(block, **options)  # type: ignore[arg-type]  # the options are embed's own

    def embed_sparse(self, texts: Sequence[str], **options: Unpack[TextOptions]) -> list[SparseVector]:
        """Sparse vectors of texts: weights of tokens of the vocabulary, in the order of the texts.

        The options are those of `embed`. Raises InputError for a model that has no sparse vectors, and as `embed` does.
        """
        require_tasks(self.model, Task.SPARSE)
        encoded = self._encode(texts, options)
        vectors: dict[int, SparseVector] = {}
        for numbers, rows in self._rows(encoded, Task.SPARSE, options):
            vectors.update(zip(numbers.tolist(), rows.sparse_vectors(), strict=True))
        return [vectors[number] for number in range(len(texts))]

    def embed_multi(
        self, texts: Sequence[str], *, is_query: bool = False, **options: Unpack[TextOptions]
    ) -> list[Vectors]:
        """Vectors of the tokens of texts, each of length 1: float32 [vectors, columns] for each text, in their order.

        Queries and documents (`is_query`) differ in their prompts, their lengths, and the tokens that have a vector.
        `prompt_name` names another of the model's prompts. The other options are those of `embed`. Raises InputError
        for a model that has no multi-vectors, and as `embed` does.
        """
        require_tasks(self.model, Task.MULTI)
        head = cast("MultiVector", self.model.heads.multi_vector)
        _check_flags(is_query=is_query)
        encoded = self._encode(texts, options, is_query)
        starts, vectors = cumulative(encoded.lengths), dict[int, Vectors]()
        mask = multi_vector_mask(encoded.ids, starts, head, is_query=is_query)
        for numbers, rows in self._rows(encoded, Task.MULTI, options):
            for number, start, stop in zip(numbers.tolist(), rows.offsets, rows.offsets[1:], strict=False):
                own = rows.values[start:stop][mask[starts[number] : starts[number + 1]]]
                vectors[number] = pool(own, head.role(is_query))
        return [vectors[number] for number in range(len(texts))]

    def score(self, pairs: Sequence[Pair], **options: Unpack[PairOptions]) -> Vectors:
        """Score pairs of texts with a model of one label, such as a reranker, or of late interaction: float32 [n].

        Scores are what the model's files make of its logits, mostly their sigmoid. The longer text of a pair that is
        too long is cut first. With late interaction the first texts are queries, and scores are MaxSim. Raises
        InputError as `classify` does, for a model with several labels, and for an instruction that the model does not
        read or that leaves no token for a pair.
        """
        instruction = self._check_pair_options(options)
        check_sequence(pairs, "pairs")
        if self.model.late_interaction is not None:
            return self._max_sims(*_split_pairs(dict(enumerate(pairs)), "pairs"), ("pairs", "pairs"), options)
        classifier = self._classifier("pairs", reranks=True)
        logits = self._pair_logits(classifier, dict(enumerate(pairs)), "pairs", options, instruction)
        return scores(logits, _activation(classifier, options))[:, 0]

    def rerank(
        self, query: str, texts: Sequence[str], *, top_n: int | None = None, **options: Unpack[PairOptions]
    ) -> list[Ranked]:
        """Score each text with a query, as `score` does: the texts' indices and scores, best first.

        Equals come in the order given. `top_n` keeps that many of the best. Raises InputError as `score` does, and for
        a `top_n` below 1.
        """
        instruction = self._check_pair_options(options)
        if top_n is not None and (type(top_n) is not int or top_n < 1):
            raise InputError(f"must be at least 1, found {top_n!r}", param="top_n")
        check_text(query, "query")
        if self.model.late_interaction is not None:
            return rank(self._max_sims([query], texts, ("query", "texts"), options), "identity", top_n)
        classifier = self._classifier("texts", reranks=True)
        encoded = self.tokenizer.encode_pairs(
            [resolve_options(self.model, prompt_name=options.get("prompt_name"))[0] + query],
            texts,
            TokenizeOptions(truncate=options.get("truncate", True), param="query", instruction=instruction),
        )
        return rank(self._logits(classifier, encoded, options)[:, 0], _activation(classifier, options), top_n)

    def classify(self, texts: Sequence[str | Pair], **options: Unpack[ScoreOptions]) -> list[list[LabelScore]]:
        """Classify texts, pairs of texts or some of each: for each all labels with their scores, best first.

        Raises InputError for a model that does not classify, for an unknown prompt, for a text that is not valid
        Unicode, or too long while `truncate` is false, for a pair that is not two texts; EncoderError if a forward
        fails or a logit is not finite.
        """
        classifier = self._classifier("texts")
        _check_options(options)
        check_sequence(texts, "texts")
        logits = np.empty((len(texts), len(classifier.labels)), np.float32)
        single = [number for number, text in enumerate(texts) if isinstance(text, str)]
        pairs = {number: text for number, text in enumerate(texts) if not isinstance(text, str)}
        if single:
            encoded = self.tokenizer.encode(
                [text for text in texts if isinstance(text, str)],
                TokenizeOptions(truncate=options.get("truncate", True), param="texts"),
                prompt=resolve_options(self.model, prompt_name=options.get("prompt_name"))[0],
            )
            logits[single] = self._logits(classifier, encoded, options, single)
        if pairs:
            logits[[*pairs]] = self._pair_logits(classifier, pairs, "texts", options)
        return best_labels(logits, _activation(classifier, options), classifier.labels)

    def zero_shot(
        self,
        texts: Sequence[str],
        labels: Sequence[str],
        *,
        hypothesis_template: str = TEMPLATE,
        multi_label: bool = False,
        **options: Unpack[ScoreOptions],
    ) -> list[list[LabelScore]]:
        """Labels of the caller's own for each text, best first, by a model of natural language inference.

        As transformers' ZeroShotClassificationPipeline: a label's hypothesis is `hypothesis_template` with the label in
        the place of {}, and its logit that of entailment. Scores of a text add up to 1; with `multi_label` each is the
        label's own, against contradiction. A text that is too long is cut, a hypothesis is not.

        Raises InputError for a model without a label of entailment, for no labels or more than MOST_LABELS, for a
        template without {}, and as `classify` does.
        """
        classifier = self._classifier("texts")
        require_tasks(self.model, param="labels", entails=True)
        entailment = cast("int", classifier.entailment)
        _check_options(options)
        _check_flags(multi_label=multi_label)
        check_texts(texts, "texts")
        check_texts(labels, "labels")
        check_labels(labels, "labels")
        seconds = hypotheses(hypothesis_template, labels)
        prompt = resolve_options(self.model, prompt_name=options.get("prompt_name"))[0]
        results = []
        for text in texts:
            encoded = self.tokenizer.encode_pairs(
                [prompt + text],
                seconds,
                TokenizeOptions(
                    truncate=options.get("truncate", True), param="texts", second_param="labels", only_first=True
                ),
            )
            logits = self._logits(classifier, encoded, options)
            results.append(zero_shot_labels(logits, labels, entailment, multi_label=multi_label))
        return results

    def decide(
        self,
        state: str,
        questions: Sequence[Question],
        *,
        label_mass: bool = False,
        truncate: bool = True,
        batch_tokens: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Decision]:
        """Probabilities for the options of each question about a text, in the order of the questions.

        A language model reads each question with its options, a model of natural language inference a hypothesis for
        each option. A state that is too long is cut, a question is not. `label_mass` reads the whole vocabulary of a
        language model: the share of the options in it. The other options are those of `embed`. Raises InputError for
        another model, for too many questions or options, and as `embed` does.
        """
        require_tasks(self.model, param="questions", decides=True)
        _check_flags(label_mass=label_mass, truncate=truncate)
        check_text(state, "state")
        check_questions(self.model, questions)
        tasks = decision_tasks(self.model, label_mass=label_mass)
        tokenize = TokenizeOptions(truncate=truncate, param="state", second_param="questions", only_first=True)
        encoded = self.tokenizer.encode_pairs([state], second_texts(self.model, questions), tokenize)
        empty = np.empty(0, np.float32)
        rows = {task: [empty] * encoded.sequences for task in tasks}
        for numbers, outputs in encode_batches(
            self.encoder,
            encoded,
            tasks,
            budget=batch_budget(self.model, self.encoder, batch_tokens),
            progress=progress,
        ):
            for task, output in outputs.items():
                check_finite(output, numbers, "question")
                for number, row in zip(numbers.tolist(), output.values, strict=True):
                    rows[task][number] = row
        main, *masses = (np.stack(of_task) for of_task in rows.values())
        return read_decisions(self.model, questions, main, *masses)

    def entities(
        self,
        texts: Sequence[str],
        *,
        aggregation_strategy: Aggregation = "simple",
        ignore_labels: Sequence[str] = DEFAULT_IGNORED,
        stride: int | None = None,
        truncate: bool = True,
        batch_tokens: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[list[Entity]]:
        """The entities of each text, in the order of their characters, by a model that classifies tokens.

        As transformers' TokenClassificationPipeline: `aggregation_strategy` "none" gives one for each token, the others
        join tokens. Labels of `ignore_labels` give none. With a `stride`, a text that is too long is read in sequences
        that share that many tokens; without, it is cut.

        Raises InputError for a model that does not classify tokens, another strategy, a stride without aggregation or
        not below the tokens of a sequence, and as `embed` does.
        """
        require_tasks(self.model, Task.TOKEN_CLASSES)
        classifier = cast("TokenClassifier", self.model.heads.token_classifier)
        _check_flags(truncate=truncate)
        if aggregation_strategy not in STRATEGIES:
            raise InputError(
                f"must be one of {', '.join(STRATEGIES)}, found {aggregation_strategy!r}",
                param="aggregation_strategy",
            )
        check_texts(ignore_labels, "ignore_labels")
        options = EntityOptions(aggregation_strategy, frozenset(ignore_labels), stride)
        options.check()
        spans = self.tokenizer.encode_spans(texts, TokenizeOptions(truncate=truncate, param="texts"), stride=stride)
        logits: dict[int, Vectors] = {}
        forward: ForwardOptions = {"batch_tokens": batch_tokens, "progress": progress}
        for numbers, rows in self._rows(spans.encoded, Task.TOKEN_CLASSES, forward):
            for number, start, stop in zip(numbers.tolist(), rows.offsets, rows.offsets[1:], strict=False):
                logits[number] = rows.values[start:stop]
        rows_of = [logits[number] for number in range(spans.encoded.sequences)]
        found = entities_of(texts, spans, rows_of, classifier.labels, self.tokenizer, options)
        return [entities for entities in found if entities is not None]

    def _encode(self, texts: Sequence[str], options: TextOptions, is_query: bool | None = None) -> Encoded:
        _check_options(options, TextOptions)
        own: Any = {name: value for name, value in options.items() if name not in ForwardOptions.__annotations__}
        return encode_texts(self.model, self.tokenizer, texts, is_query=is_query, **own)

    def _check_pair_options(self, options: PairOptions) -> str | None:
        """Returns the instruction. Raises as `_check_options`, and InputError for a model that reads none."""
        _check_options(options, PairOptions)
        instruction = options.get("instruction")
        check_pair_instruction(self.model, instruction)
        return instruction

    def _pair_logits(
        self,
        classifier: Classifier,
        pairs: Mapping[int, Pair],
        param: str,
        options: ScoreOptions,
        instruction: str | None = None,
    ) -> Vectors:
        """The logits of numbered pairs: float32 [n, labels]."""
        prompt = resolve_options(self.model, prompt_name=options.get("prompt_name"))[0]
        firsts, seconds = _split_pairs(pairs, param)
        encoded = self.tokenizer.encode_pairs(
            [prompt + first for first in firsts],
            seconds,
            TokenizeOptions(
                truncate=options.get("truncate", True), param=param, second_param=param, instruction=instruction
            ),
        )
        return self._logits(classifier, encoded, options, [*pairs])

    def _max_sims(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        params: tuple[str, str],
        options: ScoreOptions,
    ) -> Vectors:
        """MaxSim of each document with its query, or with the only one: float32 [n]. `params` name both lists."""
        encoded = []
        for texts, param, is_query in zip((queries, documents), params, (True, False), strict=True):
            name = options.get("prompt_name") if is_query else None
            prompt = resolve_options(self.model, prompt_name=name, is_query=is_query)[0]
            tokenize = TokenizeOptions(truncate=options.get("truncate", True), param=param, is_query=is_query)
            encoded.append(self.tokenizer.encode(texts, tokenize, prompt=prompt))
        sims, progress = np.empty(len(documents), np.float32), options.get("progress")
        budget = batch_budget(self.model, self.encoder, options.get("batch_tokens"))
        for numbers, rows in run_batches(self.encoder, score_batches(self.encoder, *encoded, budget=budget)):
            check_finite(rows[Task.CLASSIFY], numbers)
            sims[numbers] = rows[Task.CLASSIFY].values[:, 0]
            if progress is not None:
                progress(len(numbers))
        return sims

    def _logits(
        self, classifier: Classifier, encoded: Encoded, options: ScoreOptions, inputs: Sequence[int] | None = None
    ) -> Vectors:
        """float32 [n, labels], all finite. `inputs`: the caller's number of each text, where they are not in order."""
        logits = np.empty((encoded.sequences, len(classifier.labels)), np.float32)
        for numbers, rows in self._rows(encoded, Task.CLASSIFY, options, inputs=inputs):
            logits[numbers] = rows.values
        return logits

    def _rows(
        self,
        encoded: Encoded,
        task: Task,
        options: ForwardOptions,
        *,
        inputs: Sequence[int] | None = None,
        dimensions: int = 0,
        normalize: bool = True,
    ) -> Iterator[tuple[npt.NDArray[np.intp], TaskOutput]]:
        """Encode batches for one task. Raises EncoderError, too, for rows that are not finite."""
        for numbers, rows in encode_batches(
            self.encoder,
            encoded,
            task,
            budget=batch_budget(self.model, self.encoder, options.get("batch_tokens")),
            dimensions=dimensions,
            normalize=normalize,
            progress=options.get("progress"),
        ):
            check_finite(rows[task], numbers if inputs is None else [inputs[number] for number in numbers])
            yield numbers, rows[task]

    def _classifier(self, param: str, *, reranks: bool = False) -> Classifier:
        """Returns the classifier, of one label if it `reranks`. Raises InputError if the model has none."""
        require_tasks(self.model, Task.CLASSIFY, param, reranks=reranks)
        return cast("Classifier", self.model.heads.classifier)


# The steps before and around an engine's batches, for callers that tokenize in one process and encode in another.


def encode_texts(
    model: Model,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    task: str | None = None,
    prompt_name: str | None = None,
    instruction: str | None = None,
    truncate: bool = True,
    is_query: bool | None = None,
) -> Encoded:
    """Tokenize texts with their prompt, for their adapter, as `Engine.embed` does.

    `is_query` is for late interaction only. Raises InputError as `Engine.embed` does.
    """
    prompt, adapter = resolve_options(model, task, prompt_name, is_query, instruction=instruction)
    if instruction is not None:
        if is_query is False:
            raise InputError("is for queries, and these texts are documents", param="instruction")
        alone = tokenizer.encode([prompt], TokenizeOptions(truncate=True, param="instruction"))
        check_instruction_tokens(instruction, alone, model.max_input_length)
    options = TokenizeOptions(truncate=truncate, param="texts", is_query=is_query)
    encoded = tokenizer.encode(texts, options, prompt=prompt)
    return encoded if adapter < 0 else dataclasses.replace(encoded, adapter=adapter)


def batch_budget(model: Model, encoder: Encoder, batch_tokens: int | None = None) -> int:
    """Tokens of a batch: as requested, at most the encoder's limit, and at least the longest text.

    Raises InputError for `batch_tokens` below 1.
    """
    most = encoder.max_batch_tokens
    if batch_tokens is not None and (type(batch_tokens) is not int or batch_tokens < 1):
        raise InputError(f"must be at least 1, found {batch_tokens!r}", param="batch_tokens")
    return max(min(batch_tokens or most, most), model.undivided_tokens)


def _split_pairs(pairs: Mapping[int, Pair], param: str) -> tuple[list[str], list[str]]:
    """The first and the second texts of numbered pairs. Raises InputError."""
    for number, pair in pairs.items():
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            description = len(pair) if isinstance(pair, (tuple, list)) else f"one {type(pair).__name__}"
            raise InputError(f"must be two texts, found {description}", param=param, subject=f"pair {number}")
        for text in pair:
            check_text(text, param, f"a text of pair {number}")
    return [first for first, _ in pairs.values()], [second for _, second in pairs.values()]


def _check_options(options: Mapping[str, object], kind: type = ScoreOptions) -> None:
    """Raise TypeError for an unknown option, as Python's calls do; InputError for a flag that is not a bool."""
    unknown = options.keys() - kind.__annotations__.keys()
    if unknown:
        known = ", ".join(kind.__annotations__)
        raise TypeError(f"unexpected option {min(unknown)!r}; the options are {known}")
    _check_flags(raw=options.get("raw", False), truncate=options.get("truncate", True))


def _check_flags(**flags: object) -> None:
    """Raise InputError for what is not a bool: the string "false" is true."""
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise InputError(f"must be True or False, found {value!r}", param=name)


def _activation(classifier: Classifier, options: ScoreOptions) -> str:
    return "identity" if options.get("raw", False) else classifier.activation
