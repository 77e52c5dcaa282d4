"""What a calibration leaves for predictions: constants, and what they were fitted to."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.fidelity.external_constants import FRONT, Constant, Constants, constants_of
from pagedsim.fidelity.external_server import ExternalServer, Served
from pagedsim.run.backend import Settings

NAME = "fit.json"
TRAVELS = ("model",)
"""What may be another than it was fitted for: the roofline works that out."""
WHY = {
    "hardware": "another GPU reaches other shares of its data sheet",
    **dict.fromkeys(
        ("tensor_parallel", "pipeline_parallel", "expert_parallel"),
        "what is lost between GPUs was not measured so",
    ),
    "kv_cache_dtype": "attention has other kernels for it",
    "quantization": "products have other kernels for it",
    "stack": "another serving stack has other kernels and another host",
    "batching": "prompts that ride along with decodes have other kernels than those by themselves",
    "async_scheduling": "the host works beside the GPU in one of them alone",
}


@dataclass(frozen=True)
class Fit:
    """Constants, and where they are from."""

    constants: Constants
    server: Settings
    """What they were fitted for."""
    largest: Mapping[str, int]
    """The largest steps that were fitted."""
    source: str
    """The log."""
    undecided: Sequence[str]
    """Those that the log did not decide."""

    def save(self, path: Path) -> None:
        """Write it."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Fit:
        """From the file, or from the folder of the calibration; raises ConfigError."""
        file = Path(path).expanduser()
        if file.is_dir():
            file /= NAME
        try:
            found = json.loads(file.read_text())
        except OSError as error:
            raise ConfigError(
                f"fit={path}: {file} cannot be read ({error.strerror}): must be the folder or the "
                f"{NAME} of an experiment=calibrate requests="
            ) from None
        except ValueError as error:
            raise ConfigError(f"fit={path}: is not JSON: {error}") from None
        needed = [one.name for one in fields(cls)]
        if not isinstance(found, dict) or set(found) != set(needed):
            raise ConfigError(f"fit={path}: must hold an object with {', '.join(needed)}")
        _check_constants(path, found["constants"])
        return cls(**found)

    def of(self, server: ExternalServer) -> dict[str, float]:
        """All constants of a server: these, and its own where the fit says nothing."""
        own = constants_of(server)
        if strange := [name for name in self.constants if name not in own]:
            raise ConfigError(f"fit: has {', '.join(strange)}: cost= has only {', '.join(own)}")
        return own | dict(self.constants)

    def doubts(self, server: ExternalServer, served: Served) -> Iterator[str]:
        """What this server is that the fitted one was not, in a line each."""
        facts, degrees = server.facts, tuple(name for name in WHY if name.endswith("_parallel"))
        for name in dict.fromkeys([*facts, *(name for name in degrees if name in self.server)]):
            usual = 1 if name in degrees else None  # a degree that is not named
            here, there = facts.get(name, usual), self.server.get(name, usual)
            if there == here:
                continue
            if name in TRAVELS:
                yield (
                    f"fitted for {name}={there}, and {here} is predicted: the constants are those "
                    "of the GPU and the stack, and the model's shape says the rest"
                )
            else:
                yield (
                    f"fitted for {name}={there}, but {name}={here} is predicted: {WHY[name]}, so "
                    "that this is no more than a guess"
                )
        beyond = [
            f"{name.replace('_', ' ')} {served.largest[name]:,} (fitted: {most:,})"
            for name, most in self.largest.items()
            if served.largest.get(name, 0) > 1.5 * most
        ]
        if beyond:
            yield f"some steps are far larger than any that was fitted: {', '.join(beyond)}"
        if self.undecided:
            yield f"the fitted log did not decide {', '.join(self.undecided)}"


def _check_constants(path: str | Path, constants: Any) -> None:
    if not isinstance(constants, dict) or FRONT not in constants:
        raise ConfigError(f"fit={path}: constants must be an object that has {FRONT}")
    for name, value in constants.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        most = 1.0 if Constant(name).share else sys.float_info.max
        if not number or not 0 <= value <= most or (Constant(name).share and not value):
            raise ConfigError(
                f"fit={path}: constants.{name}={value!r}: must be a number of 0 or more, and a "
                "share above 0 and at most 1"
            )
