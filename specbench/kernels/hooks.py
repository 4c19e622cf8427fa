"""Hooks of modules: what would be skipped where modules are not called."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules import module as all_modules
from torch.utils.hooks import RemovableHandle

_HF_MODULE = "transformers.utils.output_capturing"
"""Module of the hooks that ``transformers`` leaves on a model once hidden states were asked of it. They do nothing in
forwards without them.
"""


class Hooks:
    """Test of whether modules have hooks, in which case they must not be skipped."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._hooks = tuple(
            hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)
        )
        self._registered = -1

    def are_present(self) -> bool:
        """Return whether there are hooks. If it found none, it searches again only after a hook was registered."""
        registered = RemovableHandle.next_id
        if self._registered == registered:
            return False
        of_all = (all_modules._global_forward_hooks, all_modules._global_forward_pre_hooks)
        if any(of_all) or any(
            getattr(hook, "__module__", None) != _HF_MODULE
            for hooks in self._hooks
            for hook in hooks.values()
        ):
            return True
        self._registered = registered
        return False
