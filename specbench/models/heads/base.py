"""What the formats of trained heads have in common: their registry, configurations and weights.

A format is a file of this folder: how its configuration is recognized and checked, and, with ``@register``, the
function that makes its module. notes/head-formats.md has their tensors and settings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import torch
from msgspec import Meta
from torch import nn
from transformers import PreTrainedConfig

from specbench.backends.torch.head_scorers import HeadScorer, OfTarget
from specbench.base.errors import RunError, UsageError
from specbench.base.record import Count
from specbench.base.textsafe import excerpt
from specbench.models.checkpoints import check_memory, fingerprint, read_tensors, text_config
from specbench.models.files import weight_files
from specbench.models.hub import HubModel
from specbench.models.training_metadata import TrainingMetadata, read_metadata

if TYPE_CHECKING:
    from specbench.backends.torch.scorer import Scorer
    from specbench.drafters.model import ModelDrafter

OwnHead: TypeAlias = Callable[[], torch.Tensor]
"""Returns the weight of the target's output head, [vocab, width]."""

Tensors: TypeAlias = dict[str, torch.Tensor]
"""Tensors by name."""

Size = Annotated[int, Meta(ge=1)]

# -- formats ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadFormat:
    """A format of trained heads. What ``register`` is not told is as in most formats."""

    kind: str  # name of its heads in messages and results
    scorer: Callable[[Any, OfTarget], HeadScorer] | None = None  # wraps the module
    # Makes the module of a head, with its weights, for a target of some configuration.
    module: Callable[[TrainedHead, PreTrainedConfig, OwnHead], nn.Module] | None = None
    # For heads that are whole models, loaded as any other: makes the drafter of such a model with a name.
    model_drafter: Callable[[HeadFiles, Scorer, str], ModelDrafter] | None = None
    # What `model_type` or `architectures` contain, in lower case; of several formats' the longest counts.
    names: Sequence[str] = ()
    # Whether a head is of this format although its configuration names another kind, or none.
    claims: Callable[[HeadFiles, str | None], bool] | None = None
    # Refuses a head that is no such head, or does not fit a target of some configuration.
    check: Callable[[HeadFiles, PreTrainedConfig], object] | None = None
    # The target's layers whose input states it reads, see `HeadFiles.layers`; gets their number.
    layers: Callable[[HeadFiles, int], Sequence[int]] | None = None
    context_limit: Callable[[HeadFiles], int] | None = None  # in tokens; by default the target's
    section: str = ""  # of the configuration, for some of its settings
    weights: str = ""  # name of its file of weights, without the ending, if it has one of its own
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
        FORMATS[kind] = HeadFormat(kind, scorer, **{makes: make}, **more)
        return make

    return add


def unsupported(name: str, reason: str) -> UsageError:
    """Return the refusal of a head that no format describes."""
    *kinds, last = sorted(FORMATS)
    return UsageError(
        f"The head {name} is of a kind that is not supported: {reason}.",
        f"Supported are heads of the kinds {', '.join(kinds)} and {last}.",
    )


# -- configurations --------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadFiles:
    """A head's files and configuration.

    Attributes:
        kind: One of ``FORMATS``; empty until it is recognized.
        name: Name of the head in results.
        settings: Contents of its config.json.
        hub: The repository to fetch its weights from; ``None`` if they are in the folder.
    """

    kind: str
    name: str
    folder: Path
    settings: Mapping[str, Any]
    hub: HubModel | None = field(default=None, compare=False)

    @property
    def format(self) -> HeadFormat:
        return FORMATS[self.kind]

    @property
    def layer_settings(self) -> Mapping[str, Any]:
        """The part of its configuration that describes its decoder layers."""
        sections = map(self.part, ("transformer_layer_config", "model", "text_config"))
        return next(filter(None, sections), self.settings)

    @property
    def training(self) -> TrainingMetadata:
        """Its training metadata for results."""
        form = "speculators" if "speculators_model_type" in self.settings else None
        return read_metadata(self.folder) or TrainingMetadata(kind=self.kind, form=form)

    def part(self, key: str) -> Mapping[str, Any]:
        """Return a section of its configuration; empty if there is none."""
        found = self.settings.get(key)
        return found if isinstance(found, dict) else {}

    def damaged(self, reason: str) -> RunError:
        """Return the refusal of its configuration."""
        return RunError(f"The config.json of {self.name} is damaged: {reason}.")

    def setting(self, key: str, kind: Any, default: Any = None) -> Any:
        """Return a setting; raise ``RunError`` if it is not of a kind, which ``None`` need not be."""
        sections = (self.part(self.format.section), self.settings, self.layer_settings)
        value = next((found for each in sections if (found := each.get(key)) is not None), default)
        try:
            return msgspec.convert(value, kind)
        except ValueError:
            raise self.damaged(f"its {key} is missing or has an invalid value") from None

    def number(self, key: str, default: int | None = None) -> int:
        """Return a setting that is a whole number above 0; raise ``RunError`` if it is anything else."""
        return int(self.setting(key, Size, default))

    def token(self, key: str) -> int:
        """Return a setting that is a token; raise ``RunError`` if it is anything else."""
        token = int(self.setting(key, Count))
        if token >= self.number("vocab_size"):
            raise self.damaged(f"its {key} is no token")
        return token

    def width(self, default: int | None = None) -> int:
        """Return the size of the target's hidden states."""
        width = self.number("hidden_size", default)
        return self.number("backbone_hidden_size", self.number("target_hidden_size", width))

    def layers(self, target: PreTrainedConfig) -> tuple[int, ...]:
        """Return the target's layers whose input states the head reads, as ``ForwardRequest.layers`` counts them.

        ``speculators`` and vLLM count in the same way; SGLang and SpecForge give the layer that outputs the state.

        Raises:
            UsageError: The target has no such layers. RunError: The configuration is damaged.
        """
        total = text_config(target).num_hidden_layers
        return tuple(self.format.layers(self, total)) if self.format.layers else (total,)

    def within(self, ids: Sequence[int], last: int) -> Sequence[int]:
        """Return numbers of layers; raise ``UsageError`` if the target's layers end before."""
        if not ids or not all(0 <= each <= last for each in ids):
            raise UsageError(
                f"The head {self.name} uses the inputs of layers {', '.join(map(str, ids))}, but the target's"
                f" layers are 0 to {last}.",
                "Use it with the target it was trained for.",
            )
        return ids

    def check_weights(self, identity: str, name: str, hint: str) -> None:
        """Raise ``UsageError`` if its metadata says that it was trained for weights of another ``identity``."""
        made_for = self.settings.get("target_fingerprint")
        if isinstance(made_for, str) and made_for != identity:
            raise UsageError(
                f"The head {self.name} was trained for other weights than those of {name}.", hint
            )

    def check(self, target: PreTrainedConfig, name: str) -> None:
        """Check that the configurations of head and target fit together.

        Raises:
            UsageError: The head is for another target. RunError: Its configuration is damaged.
        """
        text = text_config(target)
        if self.format.check is not None:
            self.format.check(self, target)
        if self.format.model_drafter is not None:
            return  # when it is loaded, its tokens are compared with the target's
        self.layers(target)
        width, vocab = self.width(text.hidden_size), self.number("vocab_size", text.vocab_size)
        verifier = self.part("speculators_config").get("verifier") or {}
        named, own_kinds = verifier.get("architectures"), target.architectures
        difference = None
        if width != text.hidden_size:
            difference = f"hidden states of the size {width}, and {name} has {text.hidden_size}"
        elif vocab != text.vocab_size:
            difference = f"tokens {vocab}, and {name} has {text.vocab_size}"
        elif named and own_kinds and not {*named} & {*own_kinds}:
            difference = f"a {named[0]}, and {name} is a {own_kinds[0]}"
        if difference is not None:
            raise UsageError(
                f"The head {self.name} was trained for another target: for {difference}.",
                "Choose a head of this target.",
            )


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


def load_head(files: HeadFiles, target_layers: int = 0, *, allow_pickle: bool = False) -> TrainedHead:
    """Read a head's weights.

    Args:
        target_layers: Number of the target's layers, if the head is in the target's checkpoint.

    Raises:
        UsageError: The weights are pickled, quantized, or have an invalid draft vocabulary.
        RunError: The weights are missing or damaged, or do not fit into memory.
    """
    form = files.format
    if files.hub is not None:
        files.hub.fetch_weights(allow_pickle=allow_pickle)
    found = form.read(files, target_layers) if form.read else _read_all(files, allow_pickle)
    if any(tensor.dtype == torch.int8 for tensor in found.values()):
        raise UsageError(f"The weights of the head {files.name} are quantized.", "Choose a copy in floats.")
    tensors, target_tokens = (form.convert or usual)(files, found)
    facts = f"{files.kind} {files.settings}"
    return TrainedHead(files, tensors, target_tokens, fingerprint(facts, tensors.items()))


def _read_all(files: HeadFiles, allow_pickle: bool) -> Tensors:
    names = []  # some formats have other files than the usual ones
    if own := files.format.weights:
        names = [f"{own}.safetensors", *([f"{own}.pt"] if allow_pickle else [])]
    paths = [path for name in names if (path := files.folder / name).is_file()][:1]
    paths = paths or weight_files(files.folder, files.name, allow_pickle=allow_pickle)
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
