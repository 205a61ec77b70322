"""From ``package.module:Class.method`` to the object, its owner, and the way to rebind it."""

import importlib
from dataclasses import dataclass
from typing import Any

from k3_plugins.patching.errors import MissingTarget


@dataclass(frozen=True)
class Target:
    """A resolved target.

    ``raw`` is what the owner's ``__dict__`` holds (a staticmethod or classmethod object for such methods); ``value``
    is the function, class or registry behind it.
    """

    spec: str
    owner: Any
    name: str
    raw: Any
    value: Any


def behind(value: Any) -> Any:
    """The function behind a staticmethod or classmethod object; anything else as it is."""
    # type() and not isinstance(): every object in the process passes here, and some answer __class__ with a warning.
    return value.__func__ if type(value) in (staticmethod, classmethod) else value


def like(old: Any, function: Any) -> Any:
    """Put a function into the same kind of descriptor as the old one."""
    return type(old)(function) if type(old) in (staticmethod, classmethod) else function


def resolve(spec: str, patch_id: str) -> Target:
    """Import the module and walk to the attribute.

    Raises:
        MissingTarget: if the module cannot be imported, an attribute is missing, a method is only inherited, or the
            object is of a kind that cannot be rebound (a property).
    """
    module_name, _, path = spec.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
    except Exception as error:  # broken packages below it raise all kinds
        raise MissingTarget(
            f"patch {patch_id}: module {module_name} cannot be imported ({type(error).__name__}: {error})"
        ) from error
    *parents, name = path.split(".")
    for parent in parents:
        if not hasattr(owner, parent):
            raise MissingTarget(f"patch {patch_id}: {module_name} has no {'.'.join(parents)!r} (target {spec})")
        owner = getattr(owner, parent)
    namespace = getattr(owner, "__dict__", {})
    if name not in namespace:
        inherited = f"; {name!r} is inherited, name the class that defines it" if hasattr(owner, name) else ""
        raise MissingTarget(f"patch {patch_id}: {module_name} has no {path!r} (target {spec}){inherited}")
    raw = namespace[name]
    if isinstance(raw, property):
        raise MissingTarget(f"patch {patch_id}: {spec} is a property, which cannot be patched; patch its class")
    return Target(spec=spec, owner=owner, name=name, raw=raw, value=behind(raw))


def is_registry(value: Any) -> bool:
    """True for data (a dict, a list, an object), False for functions and classes."""
    return not callable(value)
