"""Routers: who of a fleet gets a request. One a file, each built from the hooks of `router.py`."""
