"""What eight bits cost a model: measured when it is loaded, on sentences that ship with the package."""

__all__ = ["MIN_ACCURACY"]

MIN_ACCURACY = 0.995  # the least that an encoder in eight bits must have, unless another is asked for
