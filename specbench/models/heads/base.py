"""What the formats of trained heads have in common: their registry, checks and weights.

A format is a file of this folder: how its configuration is checked, and, with ``@register``, the function that makes
its module. ``head_files.py`` has how it is recognized, notes/head-formats.md its tensors and settings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedConfig

from specbench.backends.torch.head_scorers import HeadScorer, OfTarget
from specbench.base.errors import UsageError
from specbench.base.textsafe import excerpt
from specbench.models.checkpoints import check_memory, fingerprint, read_tensors, text_config
from specbench.models.files import weight_files
from specbench.models.head_files import HeadFiles

if TYPE_CHECKING:
    from specbench.backends.torch.scorer import Scorer
    from specbench.drafters.model import ModelDrafter

OwnHead: TypeAlias = Callable[[], torch.Tensor]
"""Returns the weight of the target's output head, [vocab, width]."""

Tensors: TypeAlias = dict[str, torch.Tensor]
"""Tensors by name."""

# -- formats ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadFormat:
    """A format of trained heads. What ``register`` is not told is as in most formats."""

    scorer: Callable[[Any, OfTarget], HeadScorer] | None = None  # wraps the module
    # Makes the module of a head, with its weights, for a target of some configuration.
    module: Callable[[TrainedHead, PreTrainedConfig, OwnHead], nn.Module] | None = None
    # For heads that are whole models, loaded as any other: makes the drafter of such a model with a name.
    model_drafter: Callable[[HeadFiles, Scorer, str], ModelDrafter] | None = None
    # Refuses a head that is no such head, or does not fit a target of some configuration.
    check: Callable[[HeadFiles, PreTrainedConfig], object] | None = None
    context_limit: Callable[[HeadFiles], int] | None = None  # in tokens; by default the target's
    # Reads its tensors, if these are not all in the files of weights; gets the target's number of layers.
    read: Callable[[HeadFiles, int], Tensors] | None = None
    # From the tensors of its files to `TrainedHead.tensors` and `target_tokens`.
    convert: Callable[[HeadFiles, Tensors], tuple[Tensors, torch.Tensor | None]] | None = None


FORMATS: dict[str, HeadFormat] = {}
"""Every format by its kind."""


def register(
    kind: str, scorer: Callable[..., HeadScorer] | None = None, *, makes: str = "module", **more: Any
) -> Callable[[Any], Any]:
    """Register a format in ``FORMATS``; the decorated function is its field ``makes``. See ``HeadFormat``."""

    def add(make: Any) -> Any:
        FORMATS[kind] = HeadFormat(scorer, **{makes: make}, **more)
        return make

    return add


def check_head(files: HeadFiles, target: PreTrainedConfig, name: str) -> None:
    """Check that the configurations of head and target fit together.

    Raises:
        UsageError: The head is for another target. RunError: Its configuration is damaged.
    """
    form = FORMATS[files.kind]
    if form.check is not None:
        form.check(files, target)
    if (
        form.module is not None
    ):  # of a whole model the tokens are compared with the target's, when it is loaded
        text = text_config(target)
        sizes = text.hidden_size, text.vocab_size, text.num_hidden_layers
        files.check_sizes(*sizes, target.architectures or (), name)


# -- weights ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TrainedHead:
    """A head's weights.

    Attributes:
        tensors: Its tensors, by their names in the module.
        target_tokens: The target's token for each of the head's logits; ``None`` if both count tokens in the same way.
    """

    files: HeadFiles
    tensors: Mapping[str, torch.Tensor]
    target_tokens: torch.Tensor | None
    fingerprint: str

    @property
    def name(self) -> str:
        return self.files.name

    def rows(self, own_head: OwnHead, vocab: int) -> torch.Tensor:
        """Return the rows of the target's output head for the tokens that this head drafts."""
        head = own_head()[:vocab]
        return head if self.target_tokens is None else head[self.target_tokens.to(head.device)]

    def fill(self, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give a module its weights; raise ``UsageError`` if some are missing, unexpected or of another shape."""
        try:
            module.load_state_dict(dict(tensors), assign=True)
        except RuntimeError as error:
            why = excerpt(error).partition(":")[2].strip().rstrip(".")
            raise UsageError(
                f"The weights of the head {self.name} are not those that its config.json describes: {why}.",
                "Fetch it again.",
            ) from error
        module.eval().requires_grad_(False)


def load_head(files: HeadFiles, target_layers: int = 0) -> TrainedHead:
    """Read a head's weights.

    Args:
        target_layers: Number of the target's layers, if the head is in the target's checkpoint.

    Raises:
        UsageError: The weights are pickled, quantized, or have an invalid draft vocabulary.
        RunError: The weights are missing or damaged, or do not fit into memory.
    """
    form = FORMATS[files.kind]
    if files.hub is not None:
        files.hub.fetch_weights()
    found = form.read(files, target_layers) if form.read else _read_all(files)
    if any(tensor.dtype == torch.int8 for tensor in found.values()):
        raise UsageError(f"The weights of the head {files.name} are quantized.", "Choose a copy in floats.")
    tensors, target_tokens = (form.convert or usual)(files, found)
    facts = f"{files.kind} {files.settings}"
    return TrainedHead(files, tensors, target_tokens, fingerprint(facts, tensors.items()))


def _read_all(files: HeadFiles) -> Tensors:
    paths = weight_files(files.folder, files.name)
    check_memory(2 * sum(path.stat().st_size for path in paths), name=files.name)
    found: Tensors = {}
    for path in paths:
        found |= read_tensors(path, files.name)
    return found


_UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")
"""Tensors that training leaves in a head's file."""


def usual(files: HeadFiles, tensors: Tensors) -> tuple[Tensors, torch.Tensor | None]:
    """Return tensors by the names that ``speculators`` gives them, and the target's tokens."""
    own: Tensors = {}
    for name, tensor in tensors.items():
        plain = re.sub(r"^fusion_fc\.", "fc.", name.removeprefix("model."))
        own[re.sub(r"^(midlayer|transformer)\.", "layers.0.", plain)] = tensor
    return without_maps(files, {name: tensor for name, tensor in own.items() if name not in _UNUSED})


def without_maps(files: HeadFiles, tensors: Tensors) -> tuple[Tensors, torch.Tensor | None]:
    """Return tensors without the usual maps of a draft vocabulary, and the target's tokens.

    The target's token of draft token d is d + d2t[d]; the mask t2d marks all of these tokens.
    """
    steps, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    found = None if steps is None else steps + torch.arange(len(steps))
    return tensors, checked_tokens(files, "draft_vocab_size", found)


def checked_tokens(files: HeadFiles, key: str, found: torch.Tensor | None) -> torch.Tensor | None:
    """Return the target tokens of a draft vocabulary, whose size is a setting; ``None`` without one.

    Raises:
        UsageError: They are missing or of another number, or one does not exist or is there twice.
    """
    vocab = files.number("vocab_size", 1 if found is None else None)
    drafted = files.number(key, vocab)
    right = drafted == vocab
    if found is not None:
        right = found.shape == (drafted,) == found.unique().shape and not found.is_floating_point()
        right = right and int(found.min()) >= 0 and int(found.max()) < vocab
    if not right:
        raise UsageError(
            f"The head {files.name} does not say which of the {vocab} tokens of its target it drafts.",
            "Fetch it again.",
        )
    return None if found is None else found.long()
