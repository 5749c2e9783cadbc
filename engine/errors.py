"""Every error that `embert.engine` raises on purpose.

EngineError
  ModelError            the model cannot be served; raised once, at start
    ModelNotFound         no such folder, or the hub does not know or cannot be reached
    UnsupportedModel      an architecture, activation or module that this engine does not run
      TakesNoPair           a chat template without a query and a document
      HeadMisfit            a head's matrix does not fit float16
    BrokenModel           files missing, truncated, or contradicting each other
  InputError            one request's input is not acceptable; names the field, the limit and the value
    InputTooLarge         ... because tokenizing it is too expensive
  EncoderError          a forward failed; the message says where
    EncoderLost           ... and the encoder cannot be used again: its process must be replaced

Never seen by callers of the package:
  Misfit                a merged weight does not fit float16, and another type is tried
  NoSplitPoint          a text has no split point within the limit
  TokenizerFailed       the tokenizers library failed on a text
"""


class EngineError(Exception):
    """Base of all errors that `embert.engine` raises on purpose."""


class ModelError(EngineError):
    """The model cannot be served."""


class ModelNotFound(ModelError):
    """No such folder, or the hub does not know it or cannot be reached."""


class UnsupportedModel(ModelError):
    """The model asks for something that this engine does not run."""


class TakesNoPair(UnsupportedModel):
    """A chat template does not take a query and a document."""


class HeadMisfit(UnsupportedModel):
    """A head's matrix does not fit float16; another type may hold it."""

    def __init__(self, model_id: str, reason: str) -> None:
        super().__init__(f"{model_id} cannot be run in float16: {reason}; choose bfloat16 or float32")
        self.reason = reason


class BrokenModel(ModelError):
    """Files are missing, truncated, or contradict each other."""


class InputError(EngineError):
    """An argument that cannot be served: a text or token list that cannot be encoded, or an option out of range.

    `param` names the request field and `subject` what is wrong in it, such as "text 3", or is empty for the field
    itself. `reason` is the rest of the sentence, with the value and the limit. `kind` is "tokenizer" or "validation".
    The message never contains the text itself.
    """

    def __init__(self, reason: str, *, param: str, subject: str = "", kind: str = "validation") -> None:
        super().__init__(f"`{param}`: {subject} {reason}" if subject else f"`{param}` {reason}")
        self.param = param
        self.subject = subject
        self.reason = reason
        self.kind = kind


class InputTooLarge(InputError):
    """A text without split points that is too long to tokenize at once."""


class EncoderError(EngineError):
    """A forward failed. The same encoder may be used again."""


class EncoderLost(EncoderError):
    """A forward failed, and the encoder cannot be used again."""


class Misfit(Exception):
    """A weight does not fit float16 once an adapter is merged; the model may be loaded in another type."""


class NoSplitPoint(Exception):
    """A text has no split point within the limit."""


class TokenizerFailed(Exception):
    """The library cannot tokenize a text; the message does not contain the text."""
