"""Routed feed-forward networks: each row passes the experts that a router gives it the largest weights for.

Rows are grouped by expert, so an expert is two matrix products of its rows. A row's outputs are added in the order of
the experts' numbers, so its sum has the same bits in any batch.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from embert.engine.encoders.cpu.kernels import Activation
from embert.engine.encoders.cpu.operators import Operators, Weight
from embert.engine.models.encoder_config import EncoderConfig, Experts
from embert.engine.models.tensor_names import EXPERTS_BIAS, EXPERTS_INNER, EXPERTS_OUTER, ROUTER
from embert.engine.weights.checkpoint import Checkpoint

Floats = npt.NDArray[np.float32]


class RoutedFeedForward:
    """The experts of one layer. Router, weights and sums are float32; products of experts have the layers' dtype."""

    def __init__(
        self, config: EncoderConfig, experts: Experts, checkpoint: Checkpoint, prefix: str, operators: Operators
    ) -> None:
        """`prefix` comes before the names of the layer's tensors."""
        self._top_k, self._operators = experts.top_k, operators
        self._bias = checkpoint.float32(prefix + EXPERTS_BIAS)
        self._router = operators.head_linear(checkpoint.float32(prefix + ROUTER), None, "identity")
        activation, zeros = cast("Activation", config.activation), np.zeros(config.intermediate_size, np.float32)
        stored = [
            checkpoint.float32(prefix + name).reshape(experts.count, config.intermediate_size, config.hidden_size)
            for name in (EXPERTS_INNER, EXPERTS_OUTER)
        ]
        self._experts = [
            (
                operators.linear([Weight(prefix + EXPERTS_INNER, inner, 1.0)], zeros, activation, None),
                operators.linear(
                    [Weight(prefix + EXPERTS_OUTER, np.ascontiguousarray(outer.T), 1.0)],
                    np.zeros_like(self._bias),
                    "none",
                    None,
                ),
            )
            for inner, outer in zip(*stored, strict=True)
        ]

    def __call__(self, x: Any, _adapter_mask: Floats | None, residual: Any) -> Any:
        """[T, hidden] → [T, hidden], with `residual` added. No model has experts and adapters."""
        weights = routing_weights(self._router(self._operators.leave(x)), self._top_k)
        total = self._operators.leave(residual) + self._bias
        for number, (inner, outer) in enumerate(self._experts):
            (rows,) = np.nonzero(weights[:, number])
            if len(rows):
                outputs = self._operators.leave(outer(inner(x[rows], None), None))
                total[rows] += outputs * weights[rows, number, None]
        return self._operators.to_dtype(self._operators.enter(total))


def routing_weights(logits: Floats, top_k: int) -> Floats:
    """The softmax of each row, [T, experts], with zeros except for its `top_k` largest weights.

    The weights are not scaled to a sum of 1. Of equal ones those of lower numbers count.
    """
    weights: Floats = np.exp(logits - logits.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    others = np.argsort(-weights, axis=1, kind="stable")[:, top_k:]
    np.put_along_axis(weights, others, np.float32(0), 1)
    return weights
