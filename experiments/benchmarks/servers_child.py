"""The process in which another engine serves: servers.py starts it, and reads what it leaves.

Engines start processes of their own, which import the main module again; so it is as small as this.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    from experiments.benchmarks.servers import serve

    serve(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
