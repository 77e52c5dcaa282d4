"""A process that dies, for tests of replicas."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def short_lived(config: Mapping[str, Any], pipe: Connection) -> None:
    """Listens, as far as its parent can tell, and dies the first time; then it dies at once."""
    place = Path(config["place"])
    begins = int(place.read_text() or 0) if place.exists() else 0
    place.write_text(f"{begins + 1}")
    if begins == 0 and not config["never"]:
        pipe.send("model serves at http://127.0.0.1:1")
        os.kill(os.getpid(), signal.SIGKILL)
    pipe.send("no memory")
    sys.exit(3)
