"""What a scrape of /metrics is answered with: the metrics of all processes, in the format that is asked for."""
