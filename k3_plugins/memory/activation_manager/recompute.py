"""A function whose results and inner tensors are dropped and computed again: the RECOMPUTE policy of a module.

The first run is without autograd, so nothing inside is saved; the inputs are saved, and stored by their own policies.
The results are dropped too where later operations saved them: the first one that asks for a result, or the function's
own turn in the backward pass, makes the second run, with the random states of the first. Its graph is used once.

This follows Megatron's checkpointing (a function under no_grad, its random states, a nested backward pass), so that
modules that count their calls or draw random numbers behave as they do there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from k3_plugins.memory.activation_manager.errors import ActivationError
from k3_plugins.memory.activation_manager.random_states import RandomStates


class Call:
    """One run of a function.

    Args:
        function: what to run.
        args, kwargs: nested tuples, lists and dicts; their tensors that need gradients are the function's inputs.
        counting: gives the context of the second run.
        random: the generators that the function draws from.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        counting: Callable[[], AbstractContextManager[Any]],
        random: RandomStates,
    ) -> None:
        self.name = name
        self._counting, self._random = counting, random
        self._function = function
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        self._leaves = leaves
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self.inputs: tuple[Tensor, ...] = tuple(leaves[i] for i in self._places)
        for i in self._places:
            leaves[i] = None
        self._results: tuple[Tensor, ...] | None = None
        self._detached: tuple[Tensor, ...] = ()
        self._context: Any = None
        self._random_states: Any = None
        self._result_structure: Any = None
        self._result_places: list[int] = []
        self._other_results: list[Any] = []

    def apply(self, on_result: Callable[[int, Tensor], None]) -> Any:
        """Run it; returns what the function returns, after `on_result` saw every result with its number.

        Not those that are an input or a view of one: their memory is the input's, which is needed to compute them.
        """
        inputs, self.inputs = self.inputs, ()
        results = _Recomputed.apply(self, *inputs)
        of_inputs = {tensor.untyped_storage()._cdata for tensor in inputs}
        for index, result in enumerate(results):
            if result.untyped_storage()._cdata not in of_inputs:
                on_result(index, result)
        leaves = list(self._other_results)
        for place, result in zip(self._result_places, results, strict=True):
            leaves[place] = result
        self._other_results = []
        return pytree.tree_unflatten(leaves, self._result_structure)

    def results(self) -> tuple[Tensor, ...]:
        """The floating-point results with the graph that leads to the inputs; computed at the first call."""
        if self._results is None:
            if self._context is None:
                raise ActivationError(f"{self.name} was computed again already: its graph can be used once")
            saved = self._context.saved_tensors
            self._detached = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in saved)
            with self._random.restored(self._random_states), torch.enable_grad(), self._counting():
                self._results = tuple(self._tensors(self._run(self._detached)))
            self._context = None
        return self._results

    def value(self, index: int) -> Tensor:
        """Result number ``index`` without its graph."""
        return self.results()[index].detach()

    def first_run(self, context: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """For the autograd function."""
        self._random_states = self._random.now()
        self._context = context
        leaves, self._result_structure = pytree.tree_flatten(self._run(inputs))
        # a parameter (a bias that the caller adds) is no result: it goes around the function
        self._result_places = [
            i
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and not isinstance(leaf, torch.nn.Parameter)
        ]
        self._other_results = [None if i in self._result_places else leaf for i, leaf in enumerate(leaves)]
        return tuple(leaves[i] for i in self._result_places)

    def backward(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """For the autograd function."""
        results = self.results()
        pairs = [
            (result, gradient)
            for result, gradient in zip(results, gradients, strict=True)
            if gradient is not None and result.requires_grad
        ]
        if pairs:
            torch.autograd.backward([result for result, _ in pairs], [gradient for _, gradient in pairs])
        detached, self._detached, self._results = self._detached, (), None
        return tuple(tensor.grad for tensor in detached)

    def _run(self, inputs: tuple[Tensor, ...]) -> Any:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, inputs, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return self._function(*args, **kwargs)

    def _tensors(self, results: Any) -> list[Tensor]:
        leaves = pytree.tree_flatten(results)[0]
        return [leaves[i] for i in self._result_places]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: Tensor) -> tuple[Tensor, ...]:
        results = call.first_run(ctx, inputs)
        ctx.save_for_backward(*inputs)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call, ctx.call = ctx.call, None
        return (None, *call.backward(gradients))
