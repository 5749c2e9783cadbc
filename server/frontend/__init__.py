"""The API process: routes, schemas, and the way from texts to vectors and back to bytes."""
