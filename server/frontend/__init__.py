"""The HTTP process: the app, the table of routes, operations, the OpenAPI document, and the page."""
