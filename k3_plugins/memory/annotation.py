"""Says in model code how a tensor may be stored between forward and backward pass; costs nothing when nobody listens.

    h = annotate(multiply(x, w), name="act", recompute=(multiply, x, w))   # `experts.act=recompute` drops it
    y = annotate(y, "fp8+cpu")                                            # always coded and moved to the host
    g = annotate(g, name="gate", exact=True)                              # moved if a rule says so, never rounded

Call it on the tensor that an operation saves (or on any view of the same elements), before or after the operation and
inside of autograd functions too, while the model's forward pass runs. The listener is the feature
`activation-manager`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from k3_plugins.memory.policy import Policy

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Annotation:
    """What is said about a tensor."""

    policy: Policy | None = None
    name: str | None = None
    recompute: tuple[Any, ...] | None = None
    """(function, its arguments...)."""
    exact: bool = False


class Listener(Protocol):
    """Who takes annotations."""

    def annotate(self, tensor: Tensor, annotation: Annotation) -> None:
        """Remember what was said about the elements of `tensor`."""


_listener: Listener | None = None


def set_listener(listener: Listener | None) -> Listener | None:
    """For the manager: who listens from now on; returns who did before."""
    global _listener
    before, _listener = _listener, listener
    return before


def listening() -> bool:
    """Whether annotations made now have an effect: a forward pass runs under the activation manager."""
    return _listener is not None


def annotate(
    tensor: Tensor,
    policy: Policy | str | None = None,
    *,
    name: str | None = None,
    recompute: tuple[Callable[..., Tensor], ...] | tuple[Any, ...] | None = None,
    exact: bool = False,
) -> Tensor:
    """State how the elements of a tensor are to be stored if an operation saves them for its backward pass.

    Args:
        tensor: any tensor of the forward pass.
        policy: ``keep``, ``recompute``, ``fp8``, ``cpu``, ``remote``, ``fp8+cpu`` or ``fp8+remote``. It yields only to
            a rule of the user that names the tensor without a wildcard. None leaves the choice to the rules.
        name: appended to the name of the module that runs, for rules and reports.
        recompute: ``(function, *arguments)`` that gives the same elements again; its tensor arguments are stored by
            their own policies. The function must not draw random numbers.
        exact: never round the values, whatever a policy says.

    Returns:
        The tensor itself.

    Raises:
        ValueError: an unknown policy, or ``recompute`` without a function.
    """
    parsed = None if policy is None else Policy.parse(policy)
    if parsed is Policy.RECOMPUTE and recompute is None:
        raise ValueError("annotate(tensor, 'recompute') needs recompute=(function, *arguments) to compute it from")
    if _listener is not None:
        _listener.annotate(tensor, Annotation(parsed, name, recompute, exact))
    return tensor
