"""Models with random weights for transformers' pipelines of tokens and of zero-shot classes, and texts for them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from embert import engine
from tests.oracles.model_cases import build, byte_level, unigram

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC")
NLI = ("contradiction", "neutral", "Entailment")
LENGTH = 48  # tokens of a sequence


def words(text: str) -> list[str]:
    return text.split()


WORDS = {
    "ascii": words("Angela Merkel met Dr. O'Neil-Smith in New York, at 5pm (GMT+1); cost: $3.50! e-mail me@x.org"),
    "accents": words("Müller señor Ångström naïve coöperate Zoë São Łódź İstanbul résumé cafe\u0301 ﬁne Straße ½"),
    "cjk": ["東京", "田中さんは", "北京大学", "서울에서", "\uff0c", "トヨタ", "中国China"],
    "emoji": ["🙂", "👩‍👩‍👧", "🇩🇪", "ok👍", "❤️", "a🙂b"],
    "right to left": ["שלום", "ירושלים", "مرحبا", "القاهرة،", "مُحَمَّد"],
    "odd": ["[SEP]", "[UNK]", "\u200b", "x\u00a0y", "\ufeff", "…", "\t", "²", "qxzj" * 30],
}


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of one kind of words or of several, from one word to some times LENGTH tokens."""
    chosen = random.Random(seed)
    kinds = [*WORDS]
    texts = []
    for index in range(count):
        kind = kinds[index % (len(kinds) + 2)] if index % (len(kinds) + 2) < len(kinds) else ""
        pool = WORDS[kind] if kind else [word for each in WORDS.values() for word in each]
        length = chosen.choice((1, 3, 8, 20, 60))
        texts.append(" " * chosen.choice((0, 0, 2)) + " ".join(chosen.choices(pool, k=length)))
    return texts


def cased() -> Library:
    """A cased WordPiece tokenizer of letters, some words and some of their ends."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = sorted({letter for words in WORDS.values() for word in words for letter in word if letter.isprintable()})
    letters = [letter for letter in letters if letter not in "🙂½Łñ田"]  # these are unknown
    known = ["Angela", "Merkel", "New", "York", "met", "in", "##gela", "##kel", "##ller", "Mü", "##stanbul", "East"]
    vocabulary = dict.fromkeys([*special, *letters, *(f"##{letter}" for letter in letters), *known])
    library = Library(models.WordPiece({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    library.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    return library


BERT_SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
ROBERTA_SPECIAL = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}


LIBRARIES: dict[str, Callable[[], Library]] = {
    "cased": cased,
    "byte level": functools.partial(byte_level, 300),
    "unigram": functools.partial(unigram, 120),
}


def write(folder: Path, tokenizer: str, case: str, head: str, labels: Sequence[str], **more: Any) -> Path:
    """A model with random weights, and this tokenizer, as transformers writes both."""
    names = dict(enumerate(labels))
    if tokenizer == "uncased":
        pretrained: Any = transformers.AutoTokenizer
        made = pretrained.from_pretrained(engine.load_model().folder, model_max_length=LENGTH, **more)
    else:
        library = LIBRARIES[tokenizer]()
        special = BERT_SPECIAL if tokenizer == "cased" else ROBERTA_SPECIAL
        kind: Any = transformers.PreTrainedTokenizerFast
        made = kind(tokenizer_object=library, model_max_length=LENGTH, **special, **more)
    vocabulary = len(made)
    ids = {f"{name}_token_id": getattr(made, f"{name}_token_id") for name in ("pad", "bos", "eos", "cls", "sep")}
    labeled: dict[str, Any] = {"id2label": names, "label2id": {label: number for number, label in names.items()}}
    build(folder, case, vocab_size=vocabulary, head=head, modules=False, **labeled, **ids)
    made.save_pretrained(folder)
    return folder
