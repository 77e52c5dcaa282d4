"""Routers: which replica of a fleet gets a request, by the hooks of `router.py`."""
