"""The engine process: schedules requests, packs batches, runs the encoder."""
