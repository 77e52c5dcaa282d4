"""Requests sent over HTTP: load for a server that speaks as OpenAI's does."""
