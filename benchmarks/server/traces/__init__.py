"""What OpenTelemetry traces cost the server."""
