"""The process in which serving.py has `LLM.generate` run: a line in, a rate out."""

from __future__ import annotations

import sys

from experiments.benchmarks.serving import generate

if __name__ == "__main__":
    again = generate(sys.argv[1], int(sys.argv[2]))
    for _ in sys.stdin:
        print(again(), flush=True)
