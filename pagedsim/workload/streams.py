"""Named random streams: one seed, and for each purpose a stream of its own.

A stream depends on the seed and on its name alone, so drawing more arrivals, or adding a
predictor, leaves every length as it was: runs that differ in one thing stay comparable.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from pagedsim.core.errors import require_whole


def stream(seed: int, name: str) -> np.random.Generator:
    """The random stream `name` of a run with this seed, from its beginning.

    >>> stream(1, "lengths").random() == stream(1, "lengths").random()
    True
    >>> stream(1, "lengths").random() == stream(1, "arrivals").random()
    False
    """
    require_whole("seed", seed, 0)
    key = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, key])))
