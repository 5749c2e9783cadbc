"""The tasks in each API's protocol: the form of a request, the work for it, and the form of its response."""
