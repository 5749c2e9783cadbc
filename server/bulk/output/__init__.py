"""Where vectors go: a stream, one file or a folder of shards, as JSON lines, an array or Parquet."""
