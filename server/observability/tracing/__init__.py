"""OpenTelemetry traces. Only `settings` is imported by processes without traces; the others need the extra `otel`."""
