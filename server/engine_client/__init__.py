"""HTTP process's side of the engines: admission, routing, and the socket to each engine."""
