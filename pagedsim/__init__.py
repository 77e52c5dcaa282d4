"""pagedsim: one scheduler for LLM serving, driven by a simulator and by a GPU engine.

`import pagedsim as ps` gives experiments (`ps.simulate`, `ps.compare`, …), their settings
(`ps.option`, `ps.synthetic`, `ps.trace`) and the bases of components (`ps.Policy`, …). Each name is
imported when it is first used, so that importing this package imports nothing else.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedsim.api import (
        FigureSpec,
        Option,
        Plot,
        Result,
        capacity,
        compare,
        estimate,
        experiment,
        fleet,
        metric,
        option,
        plot,
        preset,
        simulate,
        sweep,
        synthetic,
        trace,
    )
    from pagedsim.core import Batching, Memory, Policy, Preemption
    from pagedsim.engine.llm import LLM
    from pagedsim.policies.autoscaling import Autoscaler
    from pagedsim.policies.routing.router import Router
    from pagedsim.sim.cost import CostModel

__version__ = "0.1.0"

_CHECKOUT = Path(__file__).resolve().parent.parent
_BESIDE = tuple(f"{__name__}.{folder}" for folder in ("policies", "kernels", "conf", "experiments"))
"""Packages whose folders stand beside this one in a checkout; an installation has them inside."""


class _Beside:
    """Finds them."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(_CHECKOUT)]) if name in _BESIDE else None


if (_CHECKOUT / "hatch_build.py").is_file():
    sys.meta_path.append(_Beside)

__all__ = [
    "LLM",
    "Autoscaler",
    "Batching",
    "CostModel",
    "FigureSpec",
    "Memory",
    "Option",
    "Plot",
    "Policy",
    "Preemption",
    "Result",
    "Router",
    "capacity",
    "compare",
    "estimate",
    "experiment",
    "fleet",
    "metric",
    "option",
    "plot",
    "preset",
    "simulate",
    "sweep",
    "synthetic",
    "trace",
]
_ELSEWHERE = {
    **dict.fromkeys(("Batching", "Memory", "Policy", "Preemption"), "pagedsim.core"),
    "Autoscaler": "pagedsim.policies.autoscaling",
    "CostModel": "pagedsim.sim.cost",
    "LLM": "pagedsim.engine.llm",
    "Router": "pagedsim.policies.routing.router",
}
"""The modules of the names that are not in `pagedsim.api`."""


def __getattr__(name: str) -> Any:
    if name == "testing":
        return import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'pagedsim' has no attribute {name!r}")
    try:
        return getattr(import_module(_ELSEWHERE.get(name, "pagedsim.api")), name)
    except ModuleNotFoundError as error:
        if name != "LLM" or (error.name or "").startswith(__name__):
            raise
        install = "pip install -c constraints.txt '.[engine]'"
        raise ImportError(f"pagedsim.LLM: needs {error.name}: {install}") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "testing"})
