"""Every error that `embert.ray` raises on purpose.

EmbedderError    invalid model, option or text of a stage of Ray Data
ColumnError      a column of a batch is missing, exists already, or does not hold texts
ReplicaError     the server of a replica has ended, or did not become ready in time
"""


class EmbedderError(Exception):
    """Invalid model, option or text; the message names it."""


class ColumnError(ValueError):
    """A column is missing, exists already, or does not hold texts; the message names it."""


class ReplicaError(Exception):
    """The replica's server has ended, or did not become ready in time."""
