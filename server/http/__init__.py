"""HTTP below the routes: the protocol and its bounds, slow clients, middleware, keys, errors."""
