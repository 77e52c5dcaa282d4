"""Workloads: who arrives when, with how long a prompt and how long an answer."""
