"""Counts the experts that forward passes read, from what routers choose."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from specbench.decoding.records import ExpertsRead

_LEAST_ARGUMENTS = 3  # of experts: their inputs, the choices, and the weights of these


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that have the weights of several experts in one tensor and get the choices of a router.

    Families that compute all experts in every pass (Llama 4), or give each a module of its own, have none.
    """
    return [
        module
        for module in model.modules()
        if any(weight.dim() == 3 for weight in module.parameters(recurse=False))
        and len(inspect.signature(module.forward).parameters) >= _LEAST_ARGUMENTS
    ]


class ExpertChoices:
    """What the routers of a model have chosen in one or several forward passes.

    Args:
        layers: How many layers with experts the model has.
        experts: The most experts of a layer. Larger numbers stand for none.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self._layers, self._experts = layers, experts
        self.chosen: list[Tensor] = []  # [rows, experts per token] of each layer of each pass

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the choices that experts are called with; a forward hook."""
        for argument in (*args[1:], *kwargs.values()):
            if isinstance(argument, Tensor) and not argument.is_floating_point():
                self.chosen.append(argument.detach().reshape(-1, argument.shape[-1]))
                return

    def read(self, rows: slice = slice(None)) -> ExpertsRead | None:
        """Return the numbers of experts that these rows of each pass read; ``None`` if nothing was noted.

        Args:
            rows: Those of a request; by default all.
        """
        passes, left = divmod(len(self.chosen), self._layers)
        if not passes or left:
            return None
        read, alone, fed = [0] * self._layers, 0, 0
        for first in range(0, len(self.chosen), self._layers):
            chosen = [choices[rows] for choices in self.chosen[first : first + self._layers]]
            *counts, own = self._count(chosen)
            read = [total + count for total, count in zip(read, counts, strict=True)]
            alone, fed = alone + own, fed + len(chosen[0])
        return ExpertsRead(tuple(read), alone / max(1, fed))

    def _count(self, chosen: Sequence[Tensor]) -> list[int]:
        """Return how many different experts a pass read in each layer, and then how many its tokens read alone."""
        if len({choices.device for choices in chosen}) > 1:
            chosen = [choices.cpu() for choices in chosen]
        none, widest = self._experts, max(choices.shape[1] for choices in chosen)
        padded = [pad(choices, (0, widest - choices.shape[1]), value=none) for choices in chosen]
        # [layers, rows, experts of a token]
        ids = torch.stack(padded).long().clamp(max=none).sort(dim=-1).values
        repeats = ids[..., 1:] == ids[..., :-1]
        alone = (ids < none).sum() - (repeats & (ids[..., 1:] < none)).sum()
        seen = torch.zeros(len(ids), none + 1, dtype=torch.bool, device=ids.device)
        read = seen.scatter_(1, ids.flatten(1), True)[:, :none].sum(dim=1)
        # At once, as a transfer waits for the device.
        return torch.cat([read, alone[None]]).tolist()


class ExpertCounter:
    """Watches the experts of a model during single forward passes, so that others cost nothing.

    Args:
        model: Without experts nothing is watched.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = expert_modules(model)
        self._most = max(
            (weight.shape[0] for module in self._modules for weight in module.parameters(recurse=False)),
            default=0,
        )

    @contextmanager
    def watch(self) -> Iterator[ExpertChoices | None]:
        """Note what routers choose within the block; ``None`` for a model without experts."""
        if not self._modules:
            yield None
            return
        choices = ExpertChoices(len(self._modules), self._most)
        hooks = [module.register_forward_pre_hook(choices.note, with_kwargs=True) for module in self._modules]
        try:
            yield choices
        finally:
            for hook in hooks:
                hook.remove()
        if not choices.chosen:
            self._modules = []  # no router chooses among these weights
