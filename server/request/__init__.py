"""The body of a request: its JSON, its fields, and those of other APIs."""
