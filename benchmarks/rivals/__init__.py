"""What others would run instead."""
