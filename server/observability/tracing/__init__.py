"""OpenTelemetry traces. HTTP and engine processes send records of sampled requests to one process that exports spans.

HTTP and engine processes do not import OpenTelemetry: building and encoding the spans of a request takes longer than
the rest of its way through an HTTP process.
"""
