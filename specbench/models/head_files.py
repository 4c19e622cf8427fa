"""Files of trained heads: how each kind is recognized, and what its configuration says. Nothing here needs torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from specbench.base.errors import RunError, UsageError
from specbench.base.progress import Progress
from specbench.base.record import Count
from specbench.models.files import read_header, read_settings
from specbench.models.find import ModelFiles, find_model
from specbench.models.hub import HubModel
from specbench.models.training_metadata import TrainingMetadata, read_metadata
from specbench.specs.models import ModelSpec

Size = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True)
class HeadKind:
    """A kind of trained heads. ``None`` and defaults are as most kinds have it.

    Attributes:
        title: Its name in messages.
        names: What `model_type` or `architectures` contain, in lower case; of several kinds' the longest counts.
        claims: Whether a head is of this kind although its configuration names another kind, or none.
        layers: The target's layers whose input states it reads, see ``HeadFiles.layers``; gets their number.
        odd: What its configuration says that no supported head of the kind has, as a sentence.
        section: The section of the configuration that has some of its settings.
        whole: Whether it is a whole model, loaded as any other.
    """

    title: str
    names: Sequence[str] = ()
    claims: Callable[[HeadFiles, str | None], bool] | None = None
    layers: Callable[[HeadFiles, int], Sequence[int]] | None = None
    odd: Callable[[HeadFiles], str | None] | None = None
    section: str = ""
    whole: bool = False


@dataclass(frozen=True)
class HeadFiles:
    """A head's files and configuration.

    Attributes:
        kind: One of ``HEAD_KINDS``; empty until it is recognized.
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
    def layer_settings(self) -> Mapping[str, Any]:
        """The part of its configuration that describes its decoder layers."""
        sections = map(self.part, ("transformer_layer_config", "model", "text_config"))
        return next(filter(None, sections), self.settings)

    @property
    def training(self) -> TrainingMetadata:
        """Its training metadata for results."""
        form = "speculators" if "speculators_model_type" in self.settings else None
        return read_metadata(self.folder) or TrainingMetadata(kind=self.kind, form=form)

    @property
    def verifier(self) -> Mapping[str, Any]:
        """What `speculators` writes of the target that it was trained for."""
        verifier = self.part("speculators_config").get("verifier")
        return verifier if isinstance(verifier, dict) else {}

    @property
    def proposed(self) -> Any:
        """How many tokens `speculators` drafts with it in a step; ``None`` if that is not said."""
        methods = self.part("speculators_config").get("proposal_methods")
        first = methods[0] if isinstance(methods, list) and methods else None
        return first.get("speculative_tokens") if isinstance(first, dict) else None

    def part(self, key: str) -> Mapping[str, Any]:
        """Return a section of its configuration; empty if there is none."""
        found = self.settings.get(key)
        return found if isinstance(found, dict) else {}

    def damaged(self, reason: str) -> RunError:
        """Return the refusal of its configuration."""
        return RunError(f"The config.json of {self.name} is damaged: {reason}.")

    def setting(self, key: str, kind: Any, default: Any = None) -> Any:
        """Return a setting; raise ``RunError`` if it is not of a kind, which ``None`` need not be."""
        sections = (self.part(HEAD_KINDS[self.kind].section), self.settings, self.layer_settings)
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

    def layers(self, total: int) -> tuple[int, ...]:
        """Return the layers whose input states it reads, of a target with ``total``: see ``ForwardRequest.layers``.

        ``speculators`` and vLLM count in the same way; SGLang and SpecForge give the layer that outputs the state.

        Raises:
            UsageError: The target has no such layers. RunError: The configuration is damaged.
        """
        layers = HEAD_KINDS[self.kind].layers
        return tuple(layers(self, total)) if layers else (total,)

    def within(self, ids: Sequence[int], last: int) -> Sequence[int]:
        """Return numbers of layers; raise ``UsageError`` if the target's layers end before."""
        if not ids or not all(0 <= each <= last for each in ids):
            raise UsageError(
                f"The head {self.name} uses the inputs of layers {', '.join(map(str, ids))}, but the target's"
                f" layers are 0 to {last}.",
                "Use it with the target it was trained for.",
            )
        return ids

    def check_sizes(self, hidden: int, vocab: int, layers: int, classes: Sequence[str], name: str) -> None:
        """Check that it was made for a target of these sizes, and of one of these classes.

        Raises:
            UsageError: It was not, or is of another form than supported. RunError: Its configuration is damaged.
        """
        kind = HEAD_KINDS[self.kind]
        if kind.odd is not None and (odd := kind.odd(self)) is not None:
            raise unsupported(self.name, odd)
        self.layers(layers)
        width, tokens = self.width(hidden), self.number("vocab_size", vocab)
        named = self.verifier.get("architectures")
        named = [*map(str, named)] if isinstance(named, list) else []
        difference = None
        if width != hidden:
            difference = f"hidden states of the size {width}, and {name} has {hidden}"
        elif tokens != vocab:
            difference = f"tokens {tokens}, and {name} has {vocab}"
        elif named and classes and not set(named) & set(classes):
            difference = f"a {named[0]}, and {name} is a {classes[0]}"
        if difference is not None:
            raise UsageError(
                f"The head {self.name} was trained for another target: for {difference}.",
                "Choose a head of this target.",
            )

    def check_weights(self, identity: str, name: str, hint: str) -> None:
        """Raise ``UsageError`` if its metadata says that it was trained for weights of another ``identity``."""
        made_for = self.settings.get("target_fingerprint")
        if isinstance(made_for, str) and made_for != identity:
            raise UsageError(
                f"The head {self.name} was trained for other weights than those of {name}.", hint
            )


# -- recognizing -----------------------------------------------------------------------------------


def find_head(spec: ModelSpec, progress: Progress | None = None) -> HeadFiles | None:
    """Return the head in a folder or on the hub; ``None`` if it is not a head.

    Raises:
        UsageError: Nothing has that name, or the head's kind is not supported.
        RunError: Its configuration cannot be fetched or is damaged.
    """
    if spec.kind not in ("folder", "hub"):
        return None
    return head_in(find_model(spec, progress=progress))


def head_in(model: ModelFiles) -> HeadFiles | None:
    """Return the head in the files of a model; for more see ``find_head``."""
    name, settings = model.spec.name, read_settings(model.folder, model.spec.name)
    files = HeadFiles("", name, model.folder, settings, model.hub)
    kind = _kind(files)
    if kind is None:
        return None
    if kind not in HEAD_KINDS:
        raise unsupported(name, kind)
    return replace(files, kind=kind)


def _kind(files: HeadFiles) -> str | None:
    """Return the kind of head that a configuration describes; ``None`` if it does not describe a head."""
    names = {name: kind for kind, facts in HEAD_KINDS.items() for name in facts.names}
    names |= dict.fromkeys(("mlp_speculator", "mlpspeculator"), "mlp_speculator")  # known, and not supported
    named = files.settings.get("speculators_model_type")
    if isinstance(named, str):
        return names.get(named, named)
    architectures = files.settings.get("architectures")
    words = [files.settings.get("model_type"), *(architectures if isinstance(architectures, list) else [])]
    found = {name for name in names if any(name in str(word).lower() for word in words)}
    kind = names[max(found, key=len)] if found else None
    claims = (name for name, facts in HEAD_KINDS.items() if facts.claims and facts.claims(files, kind))
    return next(claims, kind)


_TENSORS = (
    ("dflash2", r"candidate_selector\."),
    ("dspark", r"markov_head\."),
    ("peagle", r"mask_hidden"),
    ("mtp", r"mtp_layers\."),
    ("medusa", r"blocks\.0\."),
    ("eagle3", r"(?:midlayer|layers\.0)\.hidden_norm\."),
    ("dflash", r"hidden_norm\."),
    ("eagle-1", r"(?:fusion_)?fc\."),
)
"""How the names of tensors begin by which a kind is told from those after it."""


def kind_of_tensors(names: Collection[str]) -> str | None:
    """Return the kind of head that has tensors of these names; ``None`` if that is not known."""
    plain = [name.removeprefix("model.") for name in names]
    return next((kind for kind, start in _TENSORS if any(re.match(start, name) for name in plain)), None)


def unsupported(name: str, reason: str) -> UsageError:
    """Return the refusal of a head that no kind describes."""
    *kinds, last = sorted(HEAD_KINDS)
    return UsageError(
        f"The head {name} is of a kind that is not supported: {reason}.",
        f"Supported are heads of the kinds {', '.join(kinds)} and {last}.",
    )


# -- kinds -----------------------------------------------------------------------------------------


def _odd_layers(files: HeadFiles, *, windows: bool = False) -> str | None:
    """Say in what decoder layers differ from Llama's; raise ``RunError`` if a size is missing."""
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        files.number(key)
    given, settings = files.layer_settings, files.settings
    if given.get("hidden_act", "silu") not in ("silu", "swish"):
        return f"its activation is {given['hidden_act']!r}"
    if not windows and given.get("sliding_window") and given.get("use_sliding_window", True):
        return f"its attention has a sliding window of {given['sliding_window']} tokens"
    if given.get("kv_lora_rank"):
        return "its attention is latent"
    if settings.get("layernorms") or settings.get("add_para_norm"):
        return "it normalizes its inputs, as HASS does"
    return None


def _odd_eagle1(files: HeadFiles) -> str | None:
    layers = files.number("num_hidden_layers", 1)
    return _odd_layers(files) if layers == 1 else f"it has {layers} layers"


def _odd_eagle3(files: HeadFiles) -> str | None:
    last = files.part("eagle_config").get("use_aux_hidden_state") is False
    return "it uses only the last hidden state" if last else _odd_layers(files)


def _odd_block(files: HeadFiles) -> str | None:
    files.token("mask_token_id")
    other = files.setting("projector_type", Any) not in (None, files.kind)
    return "it has projector_type" if other else _odd_layers(files, windows=True)


def _eagle3_layers(files: HeadFiles, total: int) -> Sequence[int]:
    """Return the layers that are named, or those of its authors. A section of its own names them by their outputs."""
    key = "eagle_aux_hidden_state_layer_ids"
    shift = 1 if files.settings.get(key) is None else 0
    named = files.setting(key, list[int] | None, files.part("eagle_config").get(key))
    ids = [2, total // 2, total - 3] if named is None else [each + shift for each in named]
    return files.within(ids, total - 1)


def _block_layers(files: HeadFiles, total: int) -> Sequence[int]:
    """Return the layers that a block drafter reads.

    The files of its authors name layers by their outputs; the output of the last layer is taken after the norm.
    """
    ids = files.setting("aux_hidden_state_layer_ids", list[int] | None)
    if ids is None:
        ids = [each + 1 for each in files.setting("target_layer_ids", list[int])]
    return files.within(ids, total)


EAGLE_MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Names that tools give the token that P-EAGLE reads in place of one to be guessed."""


def _claims_llama(files: HeadFiles, named: str | None) -> bool:
    """Return whether a configuration is that of EAGLE-1's authors, which is a Llama's of one layer.

    It is if it has an option that only heads have, or if the names of the weights say so; of weights that are not
    fetched yet, if there is no tokenizer.
    """
    settings = files.settings
    llama = settings.get("model_type") == "llama" and settings.get("num_hidden_layers") == 1
    if named is not None or not llama or "draft_vocab_size" in settings:
        return False
    if "bias" in settings:
        return True
    if files.hub is not None:
        return not any(files.folder.glob("tokenizer*"))
    with suppress(RunError):
        return "fc.weight" in read_header(files.folder / "model.safetensors")
    return False


HEAD_KINDS: dict[str, HeadKind] = {
    "eagle3": HeadKind(
        "EAGLE-3",
        ("eagle3",),
        lambda files, named: named is None and "draft_vocab_size" in files.settings,
        _eagle3_layers,
        _odd_eagle3,
    ),
    "peagle": HeadKind(
        "P-EAGLE",
        ("peagle",),
        lambda files, named: named == "eagle3" and any(key in files.settings for key in EAGLE_MASKS),
        _eagle3_layers,
        _odd_eagle3,
    ),
    "eagle-1": HeadKind("EAGLE-1", ("eagle",), _claims_llama, odd=_odd_eagle1),
    "dflash": HeadKind("DFlash", ("dflash",), None, _block_layers, _odd_block, "dflash_config"),
    "dflash2": HeadKind("DFlash 2", ("dflash2",), None, _block_layers, _odd_block, "dflash_config"),
    "dspark": HeadKind("DSpark", ("dspark",), None, _block_layers, _odd_block, "dflash_config"),
    "medusa": HeadKind(
        "Medusa",
        ("medusa",),
        lambda files, named: named is None and "medusa_num_heads" in files.settings,
        odd=lambda files: "it is stored as by its authors" if "medusa_num_heads" in files.settings else None,
    ),
    "mtp": HeadKind("MTP"),
    "pard": HeadKind(
        "PARD", claims=lambda files, named: named is None and "pard_token" in files.settings, whole=True
    ),
    "assistant": HeadKind("Gemma 4 assistant", ("gemma4_assistant", "gemma4_unified_assistant")),
}
"""Every kind, by its name in results. The order decides between two that claim a head."""
