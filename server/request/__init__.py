"""A request in an HTTP process: its body, the model that answers it, its tokens, and the bytes of its answer."""
