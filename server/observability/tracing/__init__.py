"""OpenTelemetry traces. Processes without traces import only `settings`; the other modules need the extra `otel`."""
