"""A model: the location of its files, its config, and its prompts. Reads JSON only, no weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from embert.engine.errors import BrokenModel, EngineError, ModelNotFound, UnsupportedModel
from embert.engine.files.chat_template import PairText, TakesNoPair, read_pair_text, template_of
from embert.engine.files.hub import locate
from embert.engine.files.json_files import check_keys, positive_int, read_object, read_optional
from embert.engine.files.key_tables import CONFIG_SENTENCE_TRANSFORMERS
from embert.engine.files.tokenizer_config import NO_LENGTH_LIMIT, TokenizerConfig, define, read_tokenizer_config
from embert.engine.heads.checkpoints.classifier import logit_classifier, read_classifier, stored_classifier
from embert.engine.heads.checkpoints.stored import named_groups, stored_in, stored_tensors, unused_tensors
from embert.engine.heads.checkpoints.vector_heads import CONVERT, read_vector_heads
from embert.engine.heads.description import NO_HEADS, Classifier, Heads, TokenClassifier
from embert.engine.heads.modules import Modules, read_modules
from embert.engine.heads.pooling import POOLINGS, Module, modes_of, width_after
from embert.engine.lora import PEFT_PREFIX, Lora, placed, read_lora
from embert.engine.models import EncoderConfig, check_config, read_config
from embert.engine.models.encoder_config import Adapters, position_bytes, tensor_shapes
from embert.engine.tasks import NO_TASK, Task, task_names

__all__ = ["Model", "load_model", "prompts_with_adapters", "read_prompts"]

MUCH_BYTES = 1 << 30
LEAST_ITEM_BYTES = 2  # of a weight, in float16 and bfloat16
SPLADE = "splade"  # beside POOLINGS: the head of a masked language model, and its maximum over tokens
# transformers, and torch to read weights with, are not needed to serve requests: an extra.
INSTALL_CONVERT = "pip install 'embert[convert]'"


@dataclass(frozen=True, slots=True)
class Model:
    """One model. Built by `load_model`; picklable."""

    model_id: str  # as users specify it, or the default model's hub id
    folder: Path
    revision: str | None  # the hub's commit, when known
    config: EncoderConfig  # what the encoder computes
    pooling: str  # one of sentence-transformers' modes; several, whose rows are joined, have "+" between them
    after_pooling: tuple[Module, ...]  # in order, without a Normalize at the end
    normalize: bool  # the model itself ends in a Normalize module
    max_input_length: int  # tokens, special tokens included
    prompts: dict[str, str]  # name → text put before the input
    default_prompt_name: str | None
    width: int  # columns of a vector, after all modules
    tokenizer: TokenizerConfig  # from the files beside tokenizer.json
    lowercase: bool  # texts are lowercased before the tokenizer sees them
    transformer: str  # the folder of config, tokenizer and weights inside `folder`; mostly ""
    notices: tuple[str, ...]  # sentences for the start-up log
    heads: Heads = NO_HEADS  # besides pooling
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
    def tasks(self) -> Task:
        """The tasks that this model supports."""
        return self.heads.tasks | (Task.EMBED | Task.TOKENS if self.embeds else NO_TASK)

    @property
    def task_names(self) -> list[str]:
        """The same for people; a classifier of one label also reranks, one with a label of entailment is zero-shot."""
        names, classifier = task_names(self.tasks), self.heads.classifier
        if classifier is not None and len(classifier.labels) == 1:
            names.append("rerank")
        if classifier is not None and classifier.entailment is not None:
            names.append("zero_shot")
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
    try:
        return _load(model, revision, pooling, model_id, progress=progress, on_download=on_download)
    except EngineError:
        raise
    except Exception as error:  # files may hold anything, and a server's other models go on
        raise BrokenModel(f"{model} cannot be read: {type(error).__name__}: {error}") from error


def _load(
    model: str | None,
    revision: str | None,
    pooling: str | None,
    model_id: str | None,
    *,
    progress: bool,
    on_download: Callable[[int, int], None] | None,
) -> Model:
    if pooling is not None and pooling not in (*POOLINGS, SPLADE):
        named = ", ".join((*POOLINGS, SPLADE))
        raise UnsupportedModel(f"pooling {pooling!r} is not supported; supported: {named}")
    location = locate(model, revision=revision, progress=progress, on_download=on_download)
    folder, notices = location.folder, list(location.notices)
    modules = read_modules(folder, pooling=pooling) or Modules(pooling=pooling)
    notices += modules.notices
    transformer = folder / modules.transformer
    lora, base = read_lora(transformer), None
    if not (transformer / "config.json").is_file():
        if lora is None:
            raise BrokenModel(f"{transformer} has no config.json, so it is not a model folder")
        base = _base(lora, progress, local=location.revision is None)
    weights = base or transformer
    if lora is not None:
        notices += lora.notices
        notices.append(f"the LoRA adapter {lora.weights.name} is merged into the weights of {weights}")
    # The architecture comes first: for a model that cannot run, the commands that _check_files names are of no use.
    config = read_config(weights / "config.json")
    notices += check_config(weights / "config.json")
    stated_length = modules.transformer_module.max_length
    endless = not config.position_table and (stated_length or 0) < NO_LENGTH_LIMIT
    if stated_length is not None and stated_length > config.max_positions and endless:
        notices.append(
            f"texts of up to {stated_length} tokens, as sentence-transformers' files state, are longer than "
            f"{config.max_positions}, the model's max_position_embeddings"
        )
        config = dataclasses.replace(config, max_positions=stated_length)
    head = read_classifier(folder, weights, config) if modules.only_transformer else None
    classifier = head if isinstance(head, Classifier) else None
    token_classifier = head if isinstance(head, TokenClassifier) else None
    splade = pooling == SPLADE or (pooling is None and modules.splade is not None)
    auto_class = "AutoModelForMaskedLM" if splade else "AutoModel"
    if head is not None:
        auto_class += "ForTokenClassification" if classifier is None else "ForSequenceClassification"
    _check_files(transformer, weights, auto_class)
    _check_size(weights, config)
    if classifier is not None:
        classifier = stored_classifier(classifier, config.tensors, weights)
    elif token_classifier is not None:
        token_classifier = stored_classifier(token_classifier, config.tensors, weights)
    elif modules.logit_score is not None:
        classifier = logit_classifier(folder, weights, config, modules.logit_score)
    tokenizer, tokenizer_notices = read_tokenizer_config(
        transformer, read_object(weights / "config.json"), modules.transformer_module.tokenizer
    )
    path = transformer / "tokenizer.json"
    _, definition_notices = define(path, read_object(path), tokenizer)
    notices += tokenizer_notices + definition_notices
    library = folder / "config_sentence_transformers.json"
    library_fields = read_optional(library)
    notices += check_keys(library, library_fields, CONFIG_SENTENCE_TRANSFORMERS)
    prompts, default_prompt_name = read_prompts(folder)
    prompts = prompts_with_adapters(prompts, config.adapters)
    usual_prompt = prompts[default_prompt_name] if default_prompt_name is not None else ""
    pair_text, special = None, {name: token.content for name, token in tokenizer.special.items()}
    # Without modules CrossEncoder puts the pairs of a reranker into a chat template, where there is one.
    without_modules = classifier is not None and not (folder / "modules.json").is_file()
    uses_template = without_modules or modules.transformer_module.messages
    template = template_of(transformer, modules.transformer_module.tokenizer) if uses_template else None
    if template is None and modules.transformer_module.messages:
        raise BrokenModel(f"{transformer} has no chat template, and its modules ask for one")
    if template is not None and without_modules and classifier is not None and len(classifier.labels) > 1:
        notices.append(f"{template[0]}: the chat template is for models of one label; pairs are read without it")
    elif template is not None and without_modules:
        try:
            pair_text = read_pair_text(*template, structured=None, prompt=usual_prompt, variables=special)
        except TakesNoPair as error:
            notices.append(f"{error}; pairs are read without it")
    elif template is not None:
        pair_text = read_pair_text(
            *template,
            structured=modules.transformer_module.structured,
            prompt=usual_prompt,
            variables={**special, **modules.transformer_module.template},
        )
        others = sorted(name for name in prompts if name != default_prompt_name)
        if others:
            notices.append(f"prompts of the chat template are not served: {', '.join(others)}; only the default is")
        prompts, default_prompt_name, usual_prompt = {}, None, ""
    vector_heads = read_vector_heads(
        folder,
        weights,
        config,
        modules,
        prompts,
        usual_prompt,
        pooling=pooling,
        splade=splade,
        most_weights=positive_int(library, library_fields, "max_active_dims"),
    )
    is_classifier = classifier is not None or token_classifier is not None
    embeds = vector_heads.embeds and (not is_classifier or pooling is not None)
    if is_classifier:
        if embeds:
            notices.append(f"a classification model, which embeds too because pooling {pooling} was asked for")
    elif modules.pooling is None and embeds and config.tensors.language_model:
        raise UnsupportedModel(
            f"{folder} has no pooling configuration and no classifier: {_architectures(weights) or config.model_type} "
            "generates text, which is not served; to embed with it, ask for --pooling last-token; to rerank with it, "
            "save it once with sentence_transformers.CrossEncoder(…).save_pretrained(…)"
        )
    elif modules.pooling is None and embeds:
        named = _architectures(weights)
        architectures = "" if not named or named.endswith("Model") else f"; architectures of config.json: {named}"
        notices.append(f"no pooling configuration found, using mean{architectures}")
    if vector_heads.pickled:
        notices.append(_pickled(folder, vector_heads.pickled))
    pooling_mode = "mean" if classifier is None else "cls"
    if vector_heads.embeds and modules.pooling:
        pooling_mode = modules.pooling
    after_pooling = modules.after_pooling if vector_heads.embeds else ()
    # sentence-transformers' own limit is in place of the tokenizer's, also where it is larger.
    limit = stated_length or tokenizer.max_length or config.max_positions
    max_input_length = min(limit, config.max_positions)
    multi_vector = vector_heads.multi_vector
    if multi_vector is None:
        modules.transformer_module.check_no_roles()
    if multi_vector is not None:
        # Queries and documents with lengths of their own are not bound by the transformer's: PyLate stores there the
        # length of whatever it encoded last.
        multi_vector = multi_vector.within(max_input_length)
        max_input_length = min(config.max_positions, multi_vector.longest)
    if not config.position_table:  # what encoders make for positions is as long as the longest text
        config = dataclasses.replace(config, max_positions=max_input_length)
    if position_bytes(config) > MUCH_BYTES:
        raise BrokenModel(
            f"{weights / 'config.json'} implies texts of up to {max_input_length} tokens, and tables of "
            f"{position_bytes(config)} bytes for their positions; the limit is {MUCH_BYTES}; state a lower "
            f"max_seq_length in {transformer / 'sentence_bert_config.json'}"
        )
    heads = Heads(classifier, vector_heads.sparse, multi_vector, token_classifier)
    notices += _unused(weights, config, heads, lora, pooling_mode if embeds else "")
    return Model(
        model_id=model_id or location.model_id,
        folder=folder,
        revision=location.revision or revision,
        config=config,
        pooling=pooling_mode,
        after_pooling=after_pooling,
        normalize=modules.normalize,
        max_input_length=max_input_length,
        prompts=prompts,
        default_prompt_name=default_prompt_name,
        width=width_after(folder, after_pooling, config.hidden_size * len(modes_of(pooling_mode))),
        tokenizer=tokenizer,
        lowercase=modules.transformer_module.lowercase,
        transformer=modules.transformer,
        notices=tuple(notices),
        heads=heads,
        lora=lora,
        base=base,
        include_prompt=modules.include_prompt,
        pair_text=pair_text,
        embeds=embeds,
    )


def _architectures(folder: Path) -> str:
    """`architectures` of a folder's config.json."""
    stated = read_object(folder / "config.json").get("architectures")
    return ", ".join(map(str, stated)) if isinstance(stated, list) else ""


def _unused(weights: Path, config: EncoderConfig, heads: Heads, lora: Lora | None, pooling: str) -> list[str]:
    """A sentence where nothing reads some of the stored tensors, which belong to a head that is not served.

    `pooling` is how the model embeds, if it does. Raises BrokenModel for files that cannot be read.
    """
    stored, notices = stored_tensors(weights), []
    unused = unused_tensors(stored, config, heads)
    if unused:
        named = _architectures(weights) or "none"
        served = f"; embeddings are pooled by {pooling}" if pooling else ""
        notices.append(
            f"{stored.path} has tensors that nothing uses: {named_groups(unused, config)}; architectures of "
            f"config.json: {named}{served}"
        )
    if lora is not None:
        own = placed(lora, stored_in(lora.weights).shapes, config.tensors, stored.shapes).unused
        bare = [name.removeprefix(PEFT_PREFIX) for name in own]
        if bare:
            notices.append(f"{lora.weights} has tensors that nothing uses: {named_groups(bare, config)}")
    return notices


def _base(lora: Lora, progress: bool, *, local: bool) -> Path:
    """The folder of an adapter's base model. Raises BrokenModel if it is not available.

    Only a `local` adapter may name a folder: one of the hub could name any model of this machine.
    """
    merge = (
        'merge them once with: pip install peft && python -c "from peft import AutoPeftModel as M; '
        f"M.from_pretrained('{lora.path.parent}').merge_and_unload().save_pretrained('merged')\", and put the "
        "tokenizer's files beside"
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
            f"safetensors files beside it have {size} bytes"
        )


def _pickled(folder: Path, names: tuple[str, ...]) -> str:
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
    if adapters is None:
        return prompts
    own = dict(adapters.prompts)
    of_adapters = {
        name: prompts.get(folder, own.get(name, ""))
        for name, folder in zip(adapters.names, adapters.folders or adapters.names, strict=True)
    }
    return {**of_adapters, **prompts}
