"""Where the benchmarks of a device leave what they measured, and what of it is still good."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pagedsim.metrics.jsons import read_json, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).parent.parent / "results"


def folder(device: torch.device, asked: argparse.Namespace) -> Path | None:
    """Where results go; None for nowhere: what is quick is not kept unless somebody says where."""
    if asked.out is not None or asked.quick:
        out: Path | None = asked.out
        return out
    return folder_of(device)


def folder_of(device: torch.device) -> Path:
    """Where the results of a GPU go."""
    return folder_named(torch.cuda.get_device_name(device))


def folder_named(gpu: str) -> Path:
    """The same by its name."""
    name = gpu.lower()
    return RESULTS / "-".join(name.removeprefix("nvidia ").removeprefix("geforce ").split())


def keep(place: Path | None, name: str, result: Mapping[str, Any]) -> None:
    """Write `name`.json, as far as it has come."""
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
        part = place / f".{name}.part"  # who is killed here leaves what was there
        write_json(part, dict(result))
        part.replace(place / f"{name}.json")


SAME = ("device", "code", "tiles", "dtype", "rounds", "quick")


def before(
    place: Path | None, name: str, result: Mapping[str, Any], lines: str
) -> list[dict[str, Any]]:
    """The lines that `name`.json has already, if they were measured as those of `result` will be:
    on this device, by this code, with these tiles, and the same way."""
    path = None if place is None else place / f"{name}.json"
    if path is None or not path.exists():
        return []
    kept = read_json(path)
    same = all(kept.get(key) == result.get(key) for key in SAME)
    return list(kept[lines]) if same else []


def end(
    place: Path | None, name: str, result: Mapping[str, Any], draw: Callable[[Any], Figure]
) -> None:
    """Write it with its picture, where something can draw one, and say so."""
    keep(place, name, result)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        told(place, name, "; there is no matplotlib for a picture")
        return
    picture = draw(result)
    if place is not None:
        picture.savefig(place / f"{name}.png", metadata={"Software": None})
    told(place, name, " and .png")


def told(place: Path | None, name: str, more: str = "") -> None:
    """Say where it was written."""
    if place is None:
        print("\nnothing is written: these are tiny sizes (--out FOLDER writes them all the same)")
    else:
        print(f"\n{place / name}.json{more}")
