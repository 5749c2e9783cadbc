"""Gives every latency histogram bucket bounds that are 8 % apart. Python imports it at the start of a process."""

from embert.server.observability import metrics

_BOUNDS_S = tuple(round(0.0001 * 1.08**step, 6) for step in range(120))
vars(metrics).update(REQUEST_BUCKETS_S=_BOUNDS_S, HOST_BUCKETS_S=_BOUNDS_S)
