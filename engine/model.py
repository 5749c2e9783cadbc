"""A model: the location of its files, its config, and its prompts. Reads JSON only, no weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from embert.engine.errors import BrokenModel, EngineError, ModelNotFound, TakesNoPair, UnsupportedModel
from embert.engine.files.chat_template import PairText, read_decision_text, read_pair_text, template_of
from embert.engine.files.hub import Location, locate
from embert.engine.files.json_files import architectures_of, check_keys, positive_int, read_object, read_optional
from embert.engine.files.key_tables import CONFIG_OF_MODEL2VEC, CONFIG_SENTENCE_TRANSFORMERS
from embert.engine.files.tokenizer_config import NO_LENGTH_LIMIT, TokenizerConfig, define, read_tokenizer_config
from embert.engine.heads.checkpoints.classifier import logit_classifier, read_classifier, stored_classifier
from embert.engine.heads.checkpoints.decider import LAYA, read_label_decider, read_marker_decider
from embert.engine.heads.checkpoints.late_interaction import is_stanford, marked_prompts
from embert.engine.heads.checkpoints.published_reranker import published_format, score_tokens
from embert.engine.heads.checkpoints.stored import format_groups, stored_tensors, tensors_in, unused_tensors
from embert.engine.heads.checkpoints.vector_heads import CONVERT, VectorHeads, read_vector_heads
from embert.engine.heads.description import NO_HEADS, Classifier, Heads, LabelDecider, MultiVector, TokenClassifier
from embert.engine.heads.modules import Modules, read_modules
from embert.engine.heads.pooling import POOLINGS, Dense, Module, Quantize, check_weights, modes_of, width_after
from embert.engine.lora import PEFT_PREFIX, Lora, place_tensors, read_lora
from embert.engine.models import check_config, read_config
from embert.engine.models.encoder_config import Adapters, EncoderConfig, position_bytes, tensor_shapes
from embert.engine.models.static import MODEL2VEC, MODEL2VEC_TOKENS, read_static, truncated_length
from embert.engine.tasks import NO_TASK, Task, task_names

MUCH_BYTES = 1 << 30
LEAST_ITEM_BYTES = 2  # of a weight, in float16 and bfloat16
ENCODER_PREFIX = "encoder."  # of the encoder's tensors in a folder with rl_agent_config.json
SPLADE = "splade"  # in addition to POOLINGS: the head of a masked language model, and its maximum over tokens
# transformers, and torch to read weights with, are not needed to serve requests: an extra.
INSTALL_CONVERT = "pip install 'embert[convert]'"


@dataclass(frozen=True, slots=True)
class Model:
    """Description of a model. Built by `load_model`; picklable."""

    model_id: str  # as users specify it, or the default model's hub id
    folder: Path
    config: EncoderConfig  # what the encoder computes
    max_input_length: int  # tokens, special tokens included
    width: int  # columns of a vector, after all modules
    tokenizer: TokenizerConfig  # from the files next to tokenizer.json
    transformer: str  # the folder of config, tokenizer and weights inside `folder`; mostly ""
    notices: tuple[str, ...]  # sentences for the start-up log
    pooling: str = "mean"  # sentence-transformers' mode; several, whose rows are joined, have "+" between them
    after_pooling: tuple[Module, ...] = ()  # in order, without a Normalize at the end
    normalize: bool = False  # the model itself ends in a Normalize module
    prompts: dict[str, str] = field(default_factory=dict)  # name → text put before the input
    default_prompt_name: str | None = None
    lowercase: bool = False  # texts are lowercased before the tokenizer sees them
    revision: str | None = None  # the hub's commit, when known
    heads: Heads = NO_HEADS  # in addition to pooling
    lora: Lora | None = None  # an adapter that is merged into the weights
    base: Path | None = None  # the folder of config.json and weights, where an adapter's own folder has none
    include_prompt: bool = True  # a prompt's tokens are pooled as the text's
    pair_text: PairText | None = None  # of a reranker whose pairs are put into a chat template
    embeds: bool = True  # pooled vectors and hidden states are of use; not so in a cross-encoder

    @property
    def transformer_folder(self) -> Path:
        """The folder that holds tokenizer.json, and config.json and the weights unless `base` does."""
        return self.folder / self.transformer

    @property
    def weights_folder(self) -> Path:
        """The folder that holds config.json and the weights."""
        return self.base or self.transformer_folder

    @property
    def whole_numbers(self) -> bool:
        """True if vectors are whole numbers of -127 to 127 by themselves, where they are not normalized."""
        return any(isinstance(module, Quantize) for module in self.after_pooling)

    @property
    def tasks(self) -> Task:
        """The tasks that this model supports."""
        return self.heads.tasks | (Task.EMBED | Task.TOKENS if self.embeds else NO_TASK)

    @property
    def poolings(self) -> dict[Task, str]:
        """The pooling by which each task reads rows of a text; tasks that are absent read all rows."""
        heads = self.heads
        poolings = {} if heads.classifier is None else {Task.CLASSIFY: heads.classifier.pooling}
        if isinstance(heads.decider, LabelDecider):
            poolings |= dict.fromkeys((Task.DECIDE, Task.LABEL_MASS), heads.decider.classifier.pooling)
        if self.include_prompt:
            poolings[Task.EMBED] = self.pooling
        return poolings

    @property
    def late_interaction(self) -> MultiVector | None:
        """The head that scores pairs, if the model is for late interaction alone. One that also embeds does not."""
        return self.heads.multi_vector if self.tasks == Task.MULTI else None

    @property
    def undivided_tokens(self) -> int:
        """Tokens that a batch must hold: of the longest input, or of a query and a document that are scored."""
        head = self.late_interaction
        return self.max_input_length if head is None else max(self.max_input_length, head.longest_pair)

    @property
    def task_names(self) -> list[str]:
        """The names of these tasks, and of what else the model does.

        A classifier of one label and a model of late interaction also rerank; a label of entailment makes zero-shot,
        and decides.
        """
        names, classifier = task_names(self.tasks), self.heads.classifier
        if self.late_interaction is not None or (classifier is not None and len(classifier.labels) == 1):
            names.append("rerank")
        if classifier is not None and classifier.entailment is not None:
            names += ["zero_shot", "decide"]
        return names


def load_model(
    model: str | None = None,
    *,
    revision: str | None = None,
    pooling: str | None = None,
    model_id: str | None = None,
    progress: bool = True,
    on_download: Callable[[int, int], None] | None = None,
) -> Model:
    """Find a model and read its JSON files.

    `model` is a local folder, a hub id (from the hub's cache, or fetched into it), or None for the packaged default.
    `revision` is a hub branch, tag or commit. `pooling` overrides what the model says; "splade" makes sparse vectors
    with the head of a masked language model. `model_id` overrides the name, for processes that get a folder. `progress`
    shows the download's progress bar; `on_download` gets the bytes that have come and those that are known of, in
    threads of the download.

    Raises ModelNotFound, UnsupportedModel or BrokenModel, each with one sentence for the user.
    """
    if pooling is not None and pooling not in (*POOLINGS, SPLADE):
        names = ", ".join((*POOLINGS, SPLADE))
        raise UnsupportedModel(f"pooling {pooling!r} is not supported; supported: {names}")
    try:
        location = locate(model, revision=revision, progress=progress, on_download=on_download)
        description = _read(location, pooling, progress=progress)
    except EngineError:
        raise
    except Exception as error:  # files may hold anything, and a server's other models go on
        raise BrokenModel(f"{model} cannot be read: {type(error).__name__}: {error}") from error
    return dataclasses.replace(
        description, model_id=model_id or location.model_id, revision=location.revision or revision
    )


def _read(location: Location, pooling: str | None, *, progress: bool) -> Model:
    if (location.folder / LAYA).is_file():
        return _read_laya(location, pooling)
    modules = read_modules(location.folder, pooling=pooling)
    if modules.static if modules is not None else _is_model2vec(location.folder):
        return _read_static(location, modules, pooling)
    return _Checkpoint(location, pooling, modules or Modules(pooling=pooling), progress=progress).read()


class _Prompts(NamedTuple):
    """Prompts by name, and the name of the one that applies where a request names none."""

    texts: dict[str, str]
    default_name: str | None

    @property
    def default(self) -> str:
        return "" if self.default_name is None else self.texts[self.default_name]


class _Checkpoint:
    """A checkpoint whose JSON files are read; `read` makes a Model of them in named steps.

    Steps add sentences for the start-up log to `notices`.
    """

    def __init__(self, location: Location, pooling: str | None, modules: Modules, *, progress: bool) -> None:
        self.model_id, self.folder, self.pooling = location.model_id, location.folder, pooling
        self.notices = [*location.notices]
        self.modules = modules
        self.module = self.modules.transformer_module
        self.notices += self.modules.notices
        self.transformer = self.folder / self.modules.transformer
        self.lora, self.base = read_lora(self.transformer), None
        if not (self.transformer / "config.json").is_file():
            if self.lora is None:
                raise BrokenModel(f"{self.transformer} has no config.json, so it is not a model folder")
            self.base = _base(self.lora, progress, local=location.revision is None)
        self.weights = self.base or self.transformer
        if self.lora is not None:
            self.notices += self.lora.notices
            self.notices.append(
                f"the LoRA adapter {self.lora.weights.name} is merged into the weights of {self.weights}"
            )
        self.config_path = self.weights / "config.json"
        self.config_fields = read_object(self.config_path)
        self.published, self.undecided = None, ""
        if pooling is None and not (self.folder / "modules.json").is_file():
            self.published = published_format(self.model_id, self.folder, self.config_fields)
        self.library_path = self.folder / "config_sentence_transformers.json"
        self.library_fields = read_optional(self.library_path)

    def read(self) -> Model:
        """Raise a ModelError for what cannot be served."""
        # The architecture comes first: for a model that cannot run, the commands of _check_files are of no use.
        config = self._read_config()
        classifier = self._read_classifier(config)
        tokenizer = self._read_tokenizer()
        prompts = self._read_prompts(config)
        decider, pair_text = self._read_decider(config, tokenizer, classifier)
        if decider is None:
            pair_text = self._read_pair_text(tokenizer, prompts, classifier)
        if self.module.messages:  # the template has the default prompt
            prompts = self._drop_prompts(prompts)
        tokenizer, prompts = self._add_markers(tokenizer, prompts)
        vector_heads = self._read_vector_heads(config, prompts, tokenizer)
        embeds = vector_heads.embeds and decider is None and (classifier is None or self.pooling is not None)
        if embeds:
            self._check_pooling(config, is_classifier=classifier is not None)
        pooling = "cls" if isinstance(classifier, Classifier) else "mean"
        if vector_heads.embeds and self.modules.pooling:
            pooling = self.modules.pooling
        after_pooling: tuple[Module, ...] = ()
        if vector_heads.embeds:
            after_pooling = (*self._read_projection(config, pooling), *self.modules.after_pooling)
        self._check_expansion(config, vector_heads.multi_vector)
        max_input_length, multi_vector = self._limit_lengths(config, tokenizer, vector_heads.multi_vector)
        config = self._limit_positions(config, max_input_length)
        heads = Heads(
            classifier if isinstance(classifier, Classifier) else None,
            vector_heads.sparse,
            multi_vector,
            classifier if isinstance(classifier, TokenClassifier) else None,
            decider,
        )
        self._find_unused(config, heads, after_pooling, pooling if embeds else "")
        return Model(
            model_id=self.model_id,
            folder=self.folder,
            config=config,
            pooling=pooling,
            after_pooling=after_pooling,
            normalize=self.modules.normalize,
            max_input_length=max_input_length,
            prompts=prompts.texts,
            default_prompt_name=prompts.default_name,
            width=width_after(self.folder, after_pooling, config.hidden_size * len(modes_of(pooling))),
            tokenizer=tokenizer,
            lowercase=self.module.lowercase,
            transformer=self.modules.transformer,
            notices=tuple(self.notices),
            heads=heads,
            lora=self.lora,
            base=self.base,
            include_prompt=self.modules.include_prompt,
            pair_text=pair_text,
            embeds=embeds,
        )

    def _read_config(self) -> EncoderConfig:
        """Read config.json. Without a position table, sentence-transformers' files set the length of texts."""
        config = read_config(self.config_path)
        self.notices += check_config(self.config_path)
        length = self.module.max_length
        endless = not config.position_table and (length or 0) < NO_LENGTH_LIMIT
        if length is None or length <= config.max_positions or not endless:
            return config
        self.notices.append(
            f"texts of up to {length} tokens, as sentence-transformers' files state, are longer than "
            f"{config.max_positions}, the model's max_position_embeddings"
        )
        return dataclasses.replace(config, max_positions=length)

    def _read_classifier(self, config: EncoderConfig) -> Classifier | TokenClassifier | None:
        """Check that all files are there, and read the head that classifies, if there is one."""
        head = read_classifier(self.folder, self.weights, config) if self.modules.only_transformer else None
        if isinstance(head, Classifier):
            auto_class = "AutoModelForSequenceClassification"
        elif head is not None:
            auto_class = "AutoModelForTokenClassification"
        else:
            auto_class = "AutoModelForMaskedLM" if self._is_splade else "AutoModel"
        _check_files(self.transformer, self.weights, auto_class)
        _check_size(self.weights, config)
        if head is not None:
            return stored_classifier(head, config.tensors, self.weights)
        if self.modules.logit_score is not None:
            return logit_classifier(self.folder, self.weights, config, self.modules.logit_score)
        if self.published is not None:
            self.notices.append(f"a reranker by its name or README.md: pairs have the prompt of {self.published.name}")
            tokens = score_tokens(self.published, self.transformer)
            return logit_classifier(self.folder, self.weights, config, tokens)
        return None

    @property
    def _is_splade(self) -> bool:
        return self.pooling == SPLADE or (self.pooling is None and self.modules.splade is not None)

    def _read_tokenizer(self) -> TokenizerConfig:
        """Read the files next to tokenizer.json, and check tokenizer.json itself."""
        tokenizer, notices = read_tokenizer_config(self.transformer, self.config_fields, self.module.tokenizer)
        path = self.transformer / "tokenizer.json"
        _, definition_notices = define(path, read_object(path), tokenizer)
        self.notices += notices + definition_notices
        return tokenizer

    def _read_prompts(self, config: EncoderConfig) -> _Prompts:
        self.notices += check_keys(self.library_path, self.library_fields, CONFIG_SENTENCE_TRANSFORMERS)
        prompts, default_name = read_prompts(self.folder)
        return _Prompts(prompts_with_adapters(prompts, config.adapters), default_name)

    def _read_pair_text(
        self, tokenizer: TokenizerConfig, prompts: _Prompts, classifier: Classifier | TokenClassifier | None
    ) -> PairText | None:
        """Read the chat template into which a reranker puts its pairs, if it does."""
        if self.published is not None:
            return self.published.pair_text
        # Without modules CrossEncoder puts the pairs of a reranker into a chat template, where there is one.
        without_modules = isinstance(classifier, Classifier) and not (self.folder / "modules.json").is_file()
        if not without_modules and not self.module.messages:
            return None
        template = template_of(self.transformer, self.module.tokenizer)
        if template is None:
            if self.module.messages:
                raise BrokenModel(f"{self.transformer} has no chat template, and its modules ask for one")
            return None
        special = {name: token.content for name, token in tokenizer.special.items()}
        if not without_modules:
            variables = {**special, **self.module.template}
            structured = self.module.structured
            return read_pair_text(*template, structured=structured, prompt=prompts.default, variables=variables)
        if isinstance(classifier, Classifier) and len(classifier.labels) > 1:
            self.notices.append(
                f"{template[0]}: the chat template is for models of one label; pairs are read without it"
            )
            return None
        try:
            return read_pair_text(*template, structured=None, prompt=prompts.default, variables=special)
        except TakesNoPair as error:
            self.notices.append(f"{error}; pairs are read without it")
            return None

    def _read_decider(
        self, config: EncoderConfig, tokenizer: TokenizerConfig, classifier: Classifier | TokenClassifier | None
    ) -> tuple[LabelDecider | None, PairText | None]:
        """Read how a language model with a chat template decides, which is all that it is served for."""
        is_plain = self.pooling is None and not (self.folder / "modules.json").is_file()
        if not is_plain or classifier is not None or not self._architectures.endswith("ForCausalLM"):
            return None, None
        if config.tensors.language_model is None or not config.causal:
            return None, None
        try:
            template = template_of(self.transformer, self.module.tokenizer)
            if template is None:
                return None, None
            special = {name: token.content for name, token in tokenizer.special.items()}
            pair_text = read_decision_text(*template, variables=special)
            path = self.transformer / "tokenizer.json"
            decider = read_label_decider(self.weights, self.config_fields, config, path, pair_text)
        except UnsupportedModel as error:
            self.undecided = f"; it does not decide, because {error}"
            return None, None
        self.notices.append("a language model with a chat template: it decides, and does nothing else")
        return decider, pair_text

    def _drop_prompts(self, prompts: _Prompts) -> _Prompts:
        others = sorted(name for name in prompts.texts if name != prompts.default_name)
        if others:
            self.notices.append(
                f"prompts of the chat template are not served: {', '.join(others)}; only the default is"
            )
        return _Prompts({}, None)

    def _add_markers(self, tokenizer: TokenizerConfig, prompts: _Prompts) -> tuple[TokenizerConfig, _Prompts]:
        """Put PyLate's or Stanford's markers before queries and documents of late interaction."""
        stanford = self.modules.pooling is None and is_stanford(self.config_path)
        if not self.modules.token_dense and not stanford:
            return tokenizer, prompts
        stanford_folder = None if self.modules.token_dense else self.weights
        texts, markers = marked_prompts(self.library_path, prompts.texts, stanford=stanford_folder)
        return dataclasses.replace(tokenizer, markers=markers), prompts._replace(texts=texts)

    def _read_vector_heads(self, config: EncoderConfig, prompts: _Prompts, tokenizer: TokenizerConfig) -> VectorHeads:
        heads = read_vector_heads(
            self.folder,
            self.weights,
            config,
            self.modules,
            prompts.texts,
            prompts.default,
            tokenizer.special,
            pooling=self.pooling,
            splade=self._is_splade,
            most_weights=positive_int(self.library_path, self.library_fields, "max_active_dims"),
        )
        if heads.multi_vector is None:
            self.module.check_no_roles()
        if heads.pickled:
            self.notices.append(_pickle_notice(self.folder, heads.pickled))
        return heads

    def _check_pooling(self, config: EncoderConfig, *, is_classifier: bool) -> None:
        """Refuse a language model that nobody asked to embed. Adds a notice where the files do not name a pooling."""
        if is_classifier:
            self.notices.append(
                f"a classification model, which embeds too because pooling {self.pooling} was asked for"
            )
        elif self.modules.pooling is None and config.tensors.language_model:
            raise UnsupportedModel(
                f"{self.folder} has no pooling configuration and no classifier: "
                f"{self._architectures or config.model_type} generates text, which is not served; to embed with it, "
                "ask for --pooling last-token; to rerank with it, save it once with "
                f"sentence_transformers.CrossEncoder(…).save_pretrained(…){self.undecided}"
            )
        elif self.modules.pooling is None:
            names = self._architectures
            end = "" if not names or names.endswith("Model") else f"; architectures of config.json: {names}"
            self.notices.append(f"no pooling configuration found, using mean{end}")

    def _check_expansion(self, config: EncoderConfig, head: MultiVector | None) -> None:
        """Refuse DeBERTa with tokens that are not attended to: only transformers embeds them as zeros."""
        if config.disentangled is not None and head is not None and head.unattended is not None:
            raise UnsupportedModel(
                f"{self.folder}: query expansion without attend_to_expansion_tokens is not supported for "
                f"{config.model_type}, which embeds such tokens as zeros"
            )

    @property
    def _architectures(self) -> str:
        return ", ".join(architectures_of(self.config_fields))

    def _limit_lengths(
        self, config: EncoderConfig, tokenizer: TokenizerConfig, multi_vector: MultiVector | None
    ) -> tuple[int, MultiVector | None]:
        """Return the tokens of the longest input, and the head of late interaction within that limit."""
        # sentence-transformers' own limit replaces the tokenizer's, also where it is larger.
        limit = min(self.module.max_length or tokenizer.max_length or config.max_positions, config.max_positions)
        if multi_vector is None:
            return limit, None
        # Queries and documents that state lengths are not bound by the transformer's: PyLate stores there the
        # length of whatever it encoded last.
        multi_vector = multi_vector.within(limit)
        return min(config.max_positions, multi_vector.longest), multi_vector

    def _limit_positions(self, config: EncoderConfig, max_input_length: int) -> EncoderConfig:
        """Limit the tables that encoders make for positions to the longest input. Raises BrokenModel for huge ones."""
        if not config.position_table:
            config = dataclasses.replace(config, max_positions=max_input_length)
        if position_bytes(config) > MUCH_BYTES:
            raise BrokenModel(
                f"{self.config_path} implies texts of up to {max_input_length} tokens, and tables of "
                f"{position_bytes(config)} bytes for their positions; the limit is {MUCH_BYTES}; state a lower "
                f"max_seq_length in {self.transformer / 'sentence_bert_config.json'}"
            )
        return config

    def _read_projection(self, config: EncoderConfig, pooling: str) -> tuple[Module, ...]:
        """The linear layer that the model's own code applies to every row of a text, as a module after pooling.

        Means and single rows may be multiplied after pooling. Raises UnsupportedModel for another pooling.
        """
        if not config.tensors.projection:
            return ()
        name, stored = f"{config.tensors.projection}.weight", stored_tensors(self.weights)
        if name not in stored.shapes:
            return ()
        if "max" in modes_of(pooling) or len(modes_of(pooling)) > 1:
            raise UnsupportedModel(
                f"{stored.path}: {name} multiplies every token's row, and pooling {pooling} of what it makes is "
                "not supported; supported: cls, mean, last-token"
            )
        stored.check(name, (stored.shapes[name][0] if stored.shapes[name] else 0, config.hidden_size))
        columns, file = stored.shapes[name][0], stored.files[name]
        layer = config.tensors.projection
        return (Dense(str(file.parent), config.hidden_size, columns, False, "identity", file=file.name, name=layer),)

    def _find_unused(
        self, config: EncoderConfig, heads: Heads, after_pooling: tuple[Module, ...], pooling: str
    ) -> None:
        """Add a notice for stored tensors that nothing reads: they belong to a head that is not served.

        `pooling` is how the model embeds, if it does. Raises BrokenModel for files that cannot be read.
        """
        stored = stored_tensors(self.weights)
        unused = unused_tensors(stored, config, heads)
        if config.tensors.projection and after_pooling:
            unused = [name for name in unused if name != f"{config.tensors.projection}.weight"]
        if unused:
            pooling_notice = f"; embeddings are pooled by {pooling}" if pooling else ""
            self.notices.append(
                f"{stored.path} has tensors that nothing uses: {format_groups(unused, config)}; architectures of "
                f"config.json: {self._architectures or 'none'}{pooling_notice}"
            )
        if self.lora is not None:
            own = place_tensors(self.lora, tensors_in(self.lora.weights).shapes, config.tensors, stored.shapes).unused
            bare = [name.removeprefix(PEFT_PREFIX) for name in own]
            if bare:
                self.notices.append(f"{self.lora.weights} has tensors that nothing uses: {format_groups(bare, config)}")


def _is_model2vec(folder: Path) -> bool:
    """True for the files of Model2Vec's first versions, which write no modules.json."""
    path = folder / "config.json"
    return path.is_file() and read_object(path).get("model_type") == MODEL2VEC


def _read_static(location: Location, modules: Modules | None, pooling: str | None) -> Model:
    """Read a model of static embeddings. Without `modules` its config.json is Model2Vec's."""
    folder, notices = location.folder, [*location.notices]
    if pooling not in (None, "mean"):
        raise UnsupportedModel(f"pooling {pooling!r} is not supported for static embeddings; supported: 'mean'")
    if modules is None:
        path, fields = folder / "config.json", read_object(folder / "config.json")
        notices += check_keys(path, fields, CONFIG_OF_MODEL2VEC)
        modules = Modules(static=True, normalize=bool(fields.get("normalize", False)))
        length = positive_int(path, {"max_length": MODEL2VEC_TOKENS, **fields}, "max_length")
    else:
        length = truncated_length(folder / modules.transformer)
    notices += modules.notices
    path = folder / modules.transformer / "tokenizer.json"
    check_weights(folder, modules.transformer, "SentenceTransformer")
    # The library reads tokenizer.json only, and adds no special tokens.
    tokenizer = TokenizerConfig(path.with_name("tokenizer_config.json"), has_token_types=False, adds=(False, False))
    _, definition_notices = define(path, read_object(path), tokenizer)
    library_path = folder / "config_sentence_transformers.json"
    notices += definition_notices + check_keys(library_path, read_optional(library_path), CONFIG_SENTENCE_TRANSFORMERS)
    config = read_static(path.parent, length)
    prompts, default_name = read_prompts(folder)
    return Model(
        model_id=location.model_id,
        folder=folder,
        config=config,
        after_pooling=modules.after_pooling,
        normalize=modules.normalize,
        max_input_length=config.max_positions,
        prompts=prompts,
        default_prompt_name=default_name,
        width=width_after(folder, modules.after_pooling, config.hidden_size),
        tokenizer=tokenizer,
        transformer=modules.transformer,
        notices=tuple(notices),
    )


def _read_laya(location: Location, pooling: str | None) -> Model:
    """Read a model that decides by markers before options, which is all that it is served for."""
    folder = location.folder
    if pooling is not None:
        raise UnsupportedModel(f"pooling {pooling!r} is not supported with {folder / LAYA}, whose model decides only")
    path = folder / "encoder" / "config.json"
    config, notices = read_config(path), [*location.notices, *check_config(path)]
    _check_files(folder / "tokenizer", folder, "AutoModel")
    mappings = tuple(
        dataclasses.replace(each, prefixes=(*each.prefixes, ENCODER_PREFIX)) for each in config.tensors.mappings
    )
    config = dataclasses.replace(config, tensors=dataclasses.replace(config.tensors, mappings=mappings))
    _check_size(folder, config)
    decider = read_marker_decider(folder, config)
    tokenizer, tokenizer_notices = read_tokenizer_config(folder / "tokenizer", read_object(path))
    tokenizer_path = folder / "tokenizer" / "tokenizer.json"
    _, definition_notices = define(tokenizer_path, read_object(tokenizer_path), tokenizer)
    if not config.position_table:
        config = dataclasses.replace(config, max_positions=decider.most_tokens)
    return Model(
        model_id=location.model_id,
        folder=folder,
        config=config,
        max_input_length=decider.most_tokens,
        width=config.hidden_size,
        tokenizer=tokenizer,
        transformer="tokenizer",
        notices=(*notices, *tokenizer_notices, *definition_notices),
        heads=Heads(decider=decider),
        base=folder,
        embeds=False,
    )


def _base(lora: Lora, progress: bool, *, local: bool) -> Path:
    """The folder of an adapter's base model. Raises BrokenModel if it is not available.

    Only a `local` adapter may name a folder: one of the hub could name any model of this machine.
    """
    merge = (
        'merge them once with: pip install peft && python -c "from peft import AutoPeftModel as M; '
        f"M.from_pretrained('{lora.path.parent}').merge_and_unload().save_pretrained('merged')\", and put the "
        "tokenizer's files next to"
    )
    problem = f"{lora.path.parent} holds a LoRA adapter without its base model"
    if lora.base is None:
        raise BrokenModel(f"{problem}, and base_model_name_or_path of {lora.path.name} does not name that; {merge}")
    try:
        base = locate(lora.base, revision=None, progress=progress, local=local).folder
    except ModelNotFound as error:
        raise BrokenModel(f"{problem} {lora.base}, which cannot be loaded ({error}); {merge}") from error
    if not (base / "config.json").is_file():
        raise BrokenModel(f"{problem} {lora.base}, and that has no config.json; {merge}")
    return base


def _check_size(folder: Path, config: EncoderConfig) -> None:
    """Raise BrokenModel for weights that cannot be in files of this size, before anything is allocated for them.

    The encoder compares each tensor's shape; here only what would take much memory until then is refused.
    """
    shapes = tensor_shapes(config)
    numbers = sum(math.prod(shape) for name, shape in shapes.items() if not config.tensors.is_absent(name))
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if numbers * LEAST_ITEM_BYTES > max(size, MUCH_BYTES):
        raise BrokenModel(
            f"{folder / 'config.json'} implies {numbers} weights, of at least {numbers * LEAST_ITEM_BYTES} bytes; the "
            f"safetensors files next to it have {size} bytes"
        )


def _pickle_notice(folder: Path, names: tuple[str, ...]) -> str:
    files = " and ".join(f"{name}.pt" for name in names)
    return (
        f"{files} in {folder} {'is' if len(names) == 1 else 'are'} pickled and not read: dense vectors only; to have "
        f"all, convert once with: {INSTALL_CONVERT} && cd {folder} && python -c "
        f'"{CONVERT.format(names=list(names))}"'
    )


def _check_files(folder: Path, weights: Path, auto_class: str) -> None:
    """Raise a ModelError that names the missing file, and the command that makes it where there is one.

    `folder` must have the tokenizer, and `weights` the weights. `auto_class` is transformers' class that reads all of
    them, its head's too.
    """
    if not (folder / "tokenizer.json").is_file() and weights != folder:
        raise BrokenModel(f"{folder} has an adapter and no tokenizer.json; copy the tokenizer's files from {weights}")
    if not (folder / "tokenizer.json").is_file():
        raise BrokenModel(
            f"{folder} has no tokenizer.json; make it with: {INSTALL_CONVERT} && "
            'python -c "from transformers import AutoTokenizer as T; '
            f"T.from_pretrained('{folder}').save_pretrained('{folder}')\""
        )
    if any((weights / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        return
    if any(weights.glob("pytorch_model*.bin")):
        raise UnsupportedModel(
            f"{weights} has only pickled weights (pytorch_model.bin), which can run code when read and are refused; "
            f'convert them once with: {INSTALL_CONVERT} && python -c "from transformers import {auto_class} as M; '
            f"M.from_pretrained('{weights}').save_pretrained('{weights}')\""
        )
    raise BrokenModel(f"{weights} has no weights: neither model.safetensors nor model.safetensors.index.json")


def read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """Prompts by name, and the name of the one that applies where a request names none. Raises BrokenModel."""
    path = folder / "config_sentence_transformers.json"
    fields = read_optional(path)
    prompts = fields.get("prompts") or {}
    if isinstance(prompts, dict):
        prompts = {name: text for name, text in prompts.items() if text is not None}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise BrokenModel(f"{path}: prompts must map names to texts")
    default = fields.get("default_prompt_name")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise BrokenModel(f"{path}: default_prompt_name {default!r} is not among the prompts: {', '.join(prompts)}")
    return prompts, default


def prompts_with_adapters(prompts: dict[str, str], adapters: Adapters | None) -> dict[str, str]:
    """The prompts, and one for each adapter, of its name: what the prompts say, else the adapters' own text, else none.

    So naming an adapter's prompt, or its task, selects both.
    """
    if adapters is None or not adapters.names_prompts:
        return prompts
    own = dict(adapters.prompts)
    of_adapters = {
        name: prompts.get(folder, own.get(name, ""))
        for name, folder in zip(adapters.names, adapters.folders or adapters.names, strict=True)
    }
    return {**of_adapters, **prompts}
