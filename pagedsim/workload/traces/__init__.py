"""Trace files: one reader a format; `read_table` reads any of requests, `read_sessions` any of
whole sessions."""

from pagedsim.workload.traces.read import (
    FORMATS,
    SESSIONS,
    Paths,
    Slice,
    Table,
    read_lengths,
    read_sessions,
    read_table,
    session_files,
)
from pagedsim.workload.traces.rows import Options, Tokenizer

__all__ = [
    "FORMATS",
    "SESSIONS",
    "Options",
    "Paths",
    "Slice",
    "Table",
    "Tokenizer",
    "read_lengths",
    "read_sessions",
    "read_table",
    "session_files",
]
