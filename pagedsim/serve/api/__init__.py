"""The HTTP API: paths, schemas, validation, and streaming."""
