"""A fuzzer of the HTTP port: mutated requests over raw sockets, and a judge of what comes back.

    python -m tests.fuzz --requests 10000 [--seed N] [--url http://host:port]

`routes` reads from the server's OpenAPI document what may be asked, `bodies` mutates JSON, `heads` everything before a
body, `cases` puts connections together. `client` sends a case, `responses` parses what comes back (h11),
`reading` says what the bytes sent mean as HTTP/1.1 (a strict reader, independent of the server's), and `judge` compares
the two. `campaign` runs many, with known good requests between them and an eye on memory.
"""
