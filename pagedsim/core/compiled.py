"""What classes need in a compiled package; in an interpreted one it has no effect."""

from __future__ import annotations

from _abc import _abc_init  # type: ignore[import-not-found]
from abc import abstractmethod
from inspect import signature
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
    attribute = getattr(kind, name, None)
    if isinstance(attribute, GetSetDescriptorType):
        return name not in getattr(attribute.__objclass__, "__mypyc_attrs__", ())
    return isinstance(attribute, property)


def stopped(error: StopIteration) -> RuntimeError:
    """What Python makes of a StopIteration that the body of a generator raises.

    A compiled generator would take it for its end, and a compiled `raise` sets no cause.
    """
    failure = RuntimeError("generator raised StopIteration")
    failure.__cause__ = error
    return failure


def own_abc_registry(root: type, *abstract: str) -> None:
    """Give an abstract class and its subclasses a registry of instances each, and mark its
    `abstract` methods as such; to be called again where more subclasses are defined.

    Compiled classes share a registry, so that `isinstance` errs from the second call on. Their
    abstract methods have no mark, so that an incomplete subclass would not be one, and its calls of
    what it lacks would end the process.
    """
    if "_abc_impl" not in vars(root):  # else Python made it, or this was called before
        for name in abstract:
            setattr(root, name, _marked(name, vars(root)[name]))
        _abc_init(root)
    _own(root)


def _marked(name: str, compiled: Any) -> Any:
    """A method or property that says what a subclass lacks."""

    def lacking(self: object, *args: object, **settings: object) -> Any:
        raise TypeError(f"{type(self).__name__} is abstract; it must define {name}")

    lacking.__name__, lacking.__doc__ = name, compiled.__doc__
    if isinstance(compiled, GetSetDescriptorType):
        return property(abstractmethod(lacking))
    made: Any = abstractmethod(lacking)
    made.__signature__ = signature(compiled)
    return made


def _own(kind: type) -> None:
    derived: type
    for derived in kind.__subclasses__():
        if "_abc_impl" not in vars(derived):
            _abc_init(derived)
        _own(derived)
