"""Logs of server requests: reading, simulating, fitting and scoring them."""
