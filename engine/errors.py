"""Every error that `embert.engine` raises on purpose.

EngineError
  ModelError            the model cannot be served; raised once, at start
    ModelNotFound         no such folder, or the hub does not know or cannot be reached
    UnsupportedModel      an architecture, activation or module that this engine does not run
    BrokenModel           files missing, truncated, or contradicting each other
  InputError            one request's input is not acceptable; names the field, the limit and the value
    InputTooLarge         ... because tokenizing it is too expensive
  EncoderError          a forward failed; the message says where
    EncoderLost           ... and the encoder cannot be used again: its process must be replaced
"""

__all__ = [
    "BrokenModel",
    "EncoderError",
    "EncoderLost",
    "EngineError",
    "InputError",
    "InputTooLarge",
    "ModelError",
    "ModelNotFound",
    "UnsupportedModel",
]


class EngineError(Exception):
    """Base of all errors that `embert.engine` raises on purpose."""


class ModelError(EngineError):
    """The model cannot be served."""


class ModelNotFound(ModelError):
    """No such folder, or the hub does not know it or cannot be reached."""


class UnsupportedModel(ModelError):
    """The model asks for something that this engine does not run."""


class BrokenModel(ModelError):
    """Files are missing, truncated, or contradict each other."""


class InputError(EngineError):
    """A text or token list that cannot be encoded.

    `param` names the request field. `kind` is "tokenizer" or "validation". The message never contains the text itself.
    """

    def __init__(self, message: str, *, param: str, kind: str = "validation") -> None:
        super().__init__(message)
        self.param = param
        self.kind = kind


class InputTooLarge(InputError):
    """A text without split points that is too long to tokenize at once."""


class EncoderError(EngineError):
    """A forward failed. The same encoder may be used again."""


class EncoderLost(EncoderError):
    """A forward failed, and the encoder cannot be used again."""
