"""What classes need in a compiled package; in an interpreted one it has no effect."""

from __future__ import annotations

from _abc import _abc_init  # type: ignore[import-not-found]
from types import GetSetDescriptorType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(**settings):
        """Leave the class as it is."""
        return lambda kind: kind


def computed(kind: type, name: str) -> bool:
    """Whether a class has a property of this name; a compiled one has a descriptor of its own kind
    for each attribute, too."""
    own = getattr(kind, name, None)
    if isinstance(own, GetSetDescriptorType):
        return name not in getattr(own.__objclass__, "__mypyc_attrs__", ())
    return isinstance(own, property)


def stopped(error: StopIteration) -> RuntimeError:
    """What Python makes of a StopIteration that the body of a generator raises.

    A compiled generator would take it for its end, and a compiled `raise` sets no cause.
    """
    failure = RuntimeError("generator raised StopIteration")
    failure.__cause__ = error
    return failure


def own_abc_registry(root: type) -> None:
    """Give an abstract class and its subclasses a registry of instances each; to be called again
    where more of them are defined.

    Compiled ones share one, so that `isinstance` errs from the second call on; and `root` is not
    marked as abstract.
    """
    if "_abc_impl" not in vars(root):  # else Python made it, or this was called before
        _abc_init(root)
        # Compiled methods are not marked as abstract. The text stands where Python's message, that
        # a class cannot be instantiated, would have their names.
        marked: Any = root
        marked.__abstractmethods__ = frozenset({"what it leaves open"})
    _own(root)


def _own(kind: type) -> None:
    derived: type
    for derived in kind.__subclasses__():
        if "_abc_impl" not in vars(derived):
            _abc_init(derived)
        _own(derived)
