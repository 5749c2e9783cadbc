"""Makes the `tokenizers` library's tokenizer of a checkpoint's files, as transformers 5 makes it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, normalizers, processors
from tokenizers import Tokenizer as Library

from embert.engine.files.json_files import read_object
from embert.engine.files.tokenizer_config import Definition, SpecialToken, TokenizerConfig, define


def load_library(
    path: Path, config: TokenizerConfig, *, vocab_size: int, lowercase: bool
) -> tuple[Library, dict[str, Any]]:
    """The tokenizer of the tokenizer.json at `path`, without padding and truncation, and the JSON that describes it.

    Special tokens that stand only in other files get ids below `vocab_size` or none: a text that spells out one
    of the others fails in transformers. `lowercase` lowercases texts first: do_lower_case of sentence_bert_config.json.
    Raises BrokenModel or UnsupportedModel, and what the library raises.
    """
    stored = read_object(path)
    definition, _ = define(path, stored, config)
    # Rust reads the whole file again, which costs less than handing over the parsed object.
    library = Library.from_file(str(path))
    known = tuple(_token(token) for _, token in sorted(library.get_added_tokens_decoder().items()))
    if not definition.is_generic and (definition.replaced or known != definition.tokens):
        post_processor = library.post_processor
        bare = {**definition.description, "added_tokens": [], "post_processor": None}
        library = Library.from_str(json.dumps(bare))
        if post_processor is not None:
            library.post_processor = post_processor
    _add_tokens(library, definition, stored, vocab_size)
    if definition.template is not None:
        library.post_processor = _post_processor(library, definition.template, config)
    if lowercase and not _lowercases(library.normalizer):
        library.normalizer = normalizers.Sequence([normalizers.Lowercase(), *_steps(library.normalizer)])
    library.encode_special_tokens = config.splits_special_tokens
    _add_markers(library, config.markers)
    library.no_padding()
    library.no_truncation()
    return library, _describe(definition, library)


def _add_tokens(library: Library, definition: Definition, stored: dict[str, Any], vocab_size: int) -> None:
    """Add the definition's tokens, in its order."""
    own = {token["content"] for token in stored.get("added_tokens") or ()}
    last = max(library.get_added_tokens_decoder(), default=-1)
    next_id = max(library.get_vocab_size(with_added_tokens=False), last + 1)
    added = []
    for token in definition.tokens:
        if library.token_to_id(token.content) is None:
            if next_id >= vocab_size and token.content not in own:
                continue
            next_id += 1
        added.append(AddedToken(**token._asdict()))
    library.add_tokens(added)


def _add_markers(library: Library, markers: Iterable[str]) -> None:
    """Make a special token of a marker, or of its first word, that is in the vocabulary but not found in texts."""
    for marker in markers:
        for text in (marker, *marker.split()[:1]) if marker.strip() else ():
            if library.token_to_id(text) is not None:
                if library.encode(text, add_special_tokens=False).tokens != [text]:
                    library.add_special_tokens([AddedToken(text, normalized=False, special=True)])
                break


def _post_processor(library: Library, template: str, config: TokenizerConfig) -> processors.PostProcessor:
    """The post-processor of the class: puts its special tokens around and between texts."""
    if template == "stated":
        return _stated_template(library, config)
    names = ("bos_token", "eos_token") if template == "xlm-roberta" else ("cls_token", "sep_token")
    start, end = (config.special[name].content for name in names)
    start_id, end_id = (library.token_to_id(token) for token in (start, end))
    if start_id is None or end_id is None:
        missing = start if start_id is None else end
        raise ValueError(f"{names[start_id is not None]} {missing!r} is not in the vocabulary")
    if template == "roberta":
        spaces = bool(config.fields.get("add_prefix_space", False)) and config.kind == "RobertaTokenizer"
        trims = bool(config.fields.get("trim_offsets", True))
        return processors.RobertaProcessing((end, end_id), (start, start_id), trims, spaces)
    between, second = ([end, end], 0) if template == "xlm-roberta" else ([end], 1)
    return processors.TemplateProcessing(
        single=[start, "$A", end],
        pair=[start, "$A", *between, f"$B:{second}", f"{end}:{second}"],
        special_tokens=[(start, start_id), (end, end_id)],
    )


def _stated_template(library: Library, config: TokenizerConfig) -> processors.PostProcessor:
    """The template that add_bos_token and add_eos_token state; a token that has no name is not added."""
    tokens = [config.special.get(name) for name in ("bos_token", "eos_token")]
    start, end = (
        [token.content] if adds and token is not None else []
        for adds, token in zip(config.adds or (), tokens, strict=True)
    )
    ids = [(token, library.token_to_id(token)) for token in dict.fromkeys((*start, *end))]
    for token, token_id in ids:
        if token_id is None:
            raise ValueError(f"{token!r}, which its template adds, is not in the vocabulary")
    single = [*start, "$A", *end]
    second = [f"{piece}:1" for piece in (*start, "$B", *end)]
    return processors.TemplateProcessing(single=single, pair=[*single, *second], special_tokens=ids)


def _steps(normalizer: normalizers.Normalizer | None) -> list[normalizers.Normalizer]:
    if normalizer is None:
        return []
    if not isinstance(normalizer, normalizers.Sequence):
        return [normalizer]
    return [normalizer[place] for place in range(len(normalizer))]


def _lowercases(normalizer: normalizers.Normalizer | None) -> bool:
    """True for a lowercasing normalizer, as sentence-transformers finds it: BERT's own normalizer does not count."""
    return any(isinstance(step, normalizers.Lowercase) for step in _steps(normalizer))


def _describe(definition: Definition, library: Library) -> dict[str, Any]:
    """The tokenizer as tokenizer.json would describe it."""
    normalizer = library.normalizer
    tokens = library.get_added_tokens_decoder()
    return {
        **definition.description,
        "normalizer": None if normalizer is None else json.loads(normalizer.__getstate__()),
        "added_tokens": [{"id": token_id, **_token(token)._asdict()} for token_id, token in tokens.items()],
    }


def _token(token: AddedToken) -> SpecialToken:
    return SpecialToken(token.content, token.single_word, token.lstrip, token.rstrip, token.normalized, token.special)
