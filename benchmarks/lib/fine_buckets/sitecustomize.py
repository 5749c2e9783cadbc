"""Gives every latency histogram bucket bounds that are 8 % apart. Python imports it at the start of a process."""

import embert.server.observability.metrics

_BOUNDS_S = tuple(round(0.0001 * 1.08**step, 6) for step in range(120))
embert.server.observability.metrics.REQUEST_BUCKETS_S = _BOUNDS_S
embert.server.observability.metrics.HOST_BUCKETS_S = _BOUNDS_S
