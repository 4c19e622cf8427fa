"""The forms in which a target drafts for itself: which layers, in which precision, and the models made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from specbench.backends.torch.kernels.linear import first_layers, int8_copy
from specbench.errors import UsageError
from specbench.specs.notation import Options, join_spec, split_spec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["SelfForm", "cheaper_form", "skippable_layers"]

_WRITTEN = {"int8": "int8", "layers": "layers=N", "skip": "skip=I-J-...", "calibrated": "calibrated"}
_DEFAULTS = {"int8": False, "layers": None, "skip": ""}


@dataclass(frozen=True)
class SelfForm:
    """What a ``self:`` spec asks for.

    Attributes:
        int8: Its linear layers quantised.
        layers: Its first so many decoder layers; ``None`` for all.
        skip: Those left out, counted from 0, ascending.
        calibrated: What was chosen by ``specbench calibrate``; excludes the others.
    """

    int8: bool = False
    layers: int | None = None
    skip: tuple[int, ...] = ()
    calibrated: bool = False

    @classmethod
    def parse(cls, spec: str) -> SelfForm:
        """Read ``self:int8``, ``self:layers=N``, ``self:skip=I-J-...``, a combination, or ``self:calibrated``.

        Raises:
            UsageError: It is none of these, or says nothing.
        """
        word, options = split_spec(spec)
        given = Options(word, options, _WRITTEN)
        form = cls(
            given.flag("int8"),
            given.integer("layers", None),
            tuple(sorted(set(given.integers("skip")))),
            given.flag("calibrated"),
        )
        if form == cls():
            raise UsageError(
                f"{spec!r} does not say how the target drafts for itself.",
                "Write self:int8, self:layers=N, self:skip=3-7-11, or self:calibrated.",
            )
        if form.calibrated and form != cls(calibrated=True):
            raise UsageError(
                f"{spec!r} asks for the calibrated form and for another one.", "Write self:calibrated alone."
            )
        if form.layers is not None and form.skip:
            raise UsageError(
                f"{spec!r} names the first layers and some to be skipped.",
                "Write either layers=N or skip=..., with all that are to be left out.",
            )
        return form

    @property
    def name(self) -> str:
        """As the command line takes it."""
        skip = "-".join(map(str, self.skip))
        return join_spec("self", {"int8": self.int8, "layers": self.layers, "skip": skip}, _DEFAULTS)

    def kept(self, total: int) -> tuple[int, ...]:
        """The layers it uses, of ``total``."""
        return tuple(i for i in range(total if self.layers is None else self.layers) if i not in self.skip)

    def check(self, config: PreTrainedConfig) -> None:
        """Refuse layers that a model of this configuration lacks, or cannot do without.

        Raises:
            UsageError: It cannot be.
        """
        text = config.get_text_config(decoder=True)
        total = text.num_hidden_layers
        if self.layers is not None and not 1 <= self.layers <= total:
            raise UsageError(
                f"The drafter {self.name} asks for {self.layers} layers, the target has {total}.",
                f"Give 1 to {total - 1}.",
            )
        if not self.skip:
            return
        possible = skippable_layers(config)
        if not possible:
            raise UsageError(
                "This target cannot skip layers: some of them go by the states of others.",
                "Use self:int8, or a drafter model.",
            )
        for layer in self.skip:
            if not 0 <= layer < total:
                raise UsageError(
                    f"The drafter {self.name} skips layer {layer}, the target has {total}.",
                    f"They are counted from 0 to {total - 1}.",
                )
            if layer not in possible:
                raise UsageError(
                    f"Layer {layer} cannot be skipped: the first one of each kind tells how long the cache is.",
                    "Leave it out of skip.",
                )


def skippable_layers(config: PreTrainedConfig) -> tuple[int, ...]:
    """The layers that a drafter on the target's cache can leave out, counted from 0.

    The length of the cache and the sizes of the masks are read off its first layer, and off the first of each kind
    (full attention, sliding window): these have to see every token. Models with convolution states, which know no
    length, or with layers that read the keys of others, can leave out none.
    """
    text = config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    dependent = getattr(text, "num_kv_shared_layers", 0) or len(layers) != text.num_hidden_layers
    if dependent or any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
        return ()
    kinds = [type(layer) for layer in layers]
    return tuple(i for i, kind in enumerate(kinds) if i and kinds.index(kind) != i)


def cheaper_form(model: PreTrainedModel, kept: Sequence[int], int8: bool) -> PreTrainedModel:
    """A model of some layers of the given one, with its embeddings, final norm and head.

    What stays as it is is shared; int8 layers are made one by one, and none of those that are left out.

    Args:
        model: Packed or not; it is left alone.
        kept: The decoder layers to use, ascending. Each keeps its own place in a cache of the whole model.
        int8: Quantise the linear layers.

    Raises:
        ValueError: The list of decoder layers was not found.
        UsageError: The layers were wrapped, by a device map say.
    """
    total = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(kept) == total:
        return int8_copy(model) if int8 else first_layers(model, total)
    count = max(kept) + 1
    chosen = first_layers(model, count)
    if len(kept) < count:
        path = next(
            name
            for name, child in model.named_modules()
            if isinstance(child, nn.ModuleList) and len(child) == total
        )
        _keep(chosen, path, kept)
    return int8_copy(chosen) if int8 else chosen


def _keep(model: PreTrainedModel, path: str, kept: Sequence[int]) -> None:
    """Take all but these from the list of decoder layers at ``path``; the list and its owner's configuration change."""
    owner: Any = model.get_submodule(path.rpartition(".")[0])
    name = path.rpartition(".")[2]
    layers = getattr(owner, name)
    setattr(owner, name, nn.ModuleList([layers[i] for i in kept]))
    owner.config.num_hidden_layers = len(kept)
    if getattr(owner.config, "layer_types", None):  # masks are chosen by place in the list
        owner.config.layer_types = [owner.config.layer_types[i] for i in kept]
