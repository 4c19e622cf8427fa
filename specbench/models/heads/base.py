"""Trained heads before their weights are loaded: the kind of head in a folder, and whether it fits a target."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from safetensors import safe_open
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig

from specbench.backends.torch.heads import Eagle1Head, EagleHead, EagleShape, MedusaHeads, ParallelEagleHead
from specbench.base.errors import RunError, UsageError
from specbench.base.progress import Progress
from specbench.base.textsafe import excerpt
from specbench.models.checkpoints import read_any_config, read_settings, text_config
from specbench.models.heads.assistant import ASSISTANTS, layers_of_target, make_assistant
from specbench.models.heads.block import BLOCK_KINDS, block_head
from specbench.models.hub import HubModel
from specbench.models.training_metadata import TrainingMetadata, packaged_folder, read_metadata
from specbench.specs.models import ModelSpec

HEAD_KINDS = ("eagle3", "eagle", "peagle", *BLOCK_KINDS, "medusa", "mtp", "assistant")
"""The supported kinds of heads; ``eagle`` is EAGLE-1 and 2, ``assistant`` Gemma 4's."""

_STATES = 3
"""Hidden states that an EAGLE-3 head reads unless its configuration names their layers."""

_AHEAD = 8
"""Tokens that P-EAGLE drafts in a forward pass unless its configuration says: what its authors train it for."""

_MOST_NAMES = 100_000_000
"""Bytes of the largest pickle that is searched for the names of tensors."""

_MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Names that tools give the token P-EAGLE reads in place of one to be guessed."""


@dataclass(frozen=True)
class HeadFiles:
    """A head's files and configuration.

    Attributes:
        kind: One of ``HEAD_KINDS``.
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
        """The part of its configuration that describes its decoder layer."""
        nested = self.settings.get("model") if self.settings.get("model_type") == "eagle" else None
        nested = self.settings.get("text_config") if self.kind == "assistant" else nested
        given = self.settings.get("transformer_layer_config", nested or self.settings)
        return given if isinstance(given, dict) else {}

    @property
    def training(self) -> TrainingMetadata:
        """Its training metadata for results; ``specbench train`` calls EAGLE-3 ``eagle``."""
        form = "speculators" if "speculators_model_type" in self.settings else None
        kind = "eagle-1" if self.kind == "eagle" else self.kind
        return read_metadata(self.folder) or TrainingMetadata(kind=kind, form=form)

    @property
    def is_eagle(self) -> bool:
        return self.kind in ("eagle", "eagle3", "peagle")

    @property
    def is_block(self) -> bool:
        return self.kind in BLOCK_KINDS

    @property
    def layer(self) -> LlamaConfig:
        """Return the configuration of its decoder layers; raise ``RunError`` if it is damaged."""
        for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
            self.number(key)
        given = {
            key: value for key, value in self.layer_settings.items() if key in _LAYER and value is not None
        }
        try:
            return LlamaConfig(**given)
        except Exception as error:  # configuration classes check their values in many ways
            reason = excerpt(error).rstrip(".")
            raise RunError(f"The config.json of {self.name} is damaged: {reason}.") from error

    @property
    def sizes(self) -> PreTrainedConfig:
        """Return a configuration with the head's sizes, as far as they are known without its weights."""
        if self.kind == "assistant":
            return text_config(read_any_config(self.folder, self.name))
        known: dict[str, Any] = {
            key: self.number(key, 1) for key in ("vocab_size", "hidden_size", "intermediate_size")
        }
        return LlamaConfig(
            **known, dtype=self.layer_settings.get("dtype") or self.layer_settings.get("torch_dtype")
        )

    @property
    def parameters(self) -> int:
        """The number of its weights, as far as its configuration gives it."""
        with torch.device("meta"):
            module: nn.Module = self.medusa({}) if self.kind == "medusa" else self.with_layers()
        return sum(parameter.numel() for parameter in module.parameters())

    def number(self, key: str, default: int | None = None) -> int:
        """Return a whole number from its configuration; raise ``RunError`` if the value is anything else."""
        value = self.settings.get(key)
        value = self.layer_settings.get(key, default) if value is None else value
        if type(value) is not int or value < 1:
            raise RunError(
                f"The config.json of {self.name} is damaged: its {key} is no whole number above 0."
            )
        return value

    def layers(self, target: PreTrainedConfig) -> tuple[int, ...]:
        """Return the target's layers whose input states the head reads, as ``ForwardRequest.layers`` counts them.

        ``speculators`` and vLLM count in the same way; SGLang and SpecForge give the layer that outputs the state.

        Raises:
            UsageError: The target has no such layers.
        """
        total = text_config(target).num_hidden_layers
        if self.is_block:
            return self._layersof_block(total)
        if self.kind not in ("eagle3", "peagle"):
            return (total,)
        named = self._named_layers
        return self._there([2, total // 2, total - 3] if named is None else named, total - 1)

    @property
    def assumes_layers(self) -> bool:
        """Whether its configuration does not name the layers that it reads; then EAGLE-3's usual ones are taken."""
        return self.kind in ("eagle3", "peagle") and self._named_layers is None

    @property
    def _named_layers(self) -> list[int] | None:
        """The layers that the configuration of an EAGLE-3 head names."""
        key = "eagle_aux_hidden_state_layer_ids"
        if (ids := self.settings.get(key)) is not None:
            return _whole_numbers(ids, self.name)
        nested = self.settings.get("eagle_config")
        ids = nested.get(key) if isinstance(nested, dict) else None
        return None if ids is None else [each + 1 for each in _whole_numbers(ids, self.name)]

    def _layersof_block(self, total: int) -> tuple[int, ...]:
        """Return the layers whose hidden states a block drafter reads.

        The files of its authors name layers by their outputs; the output of the last layer is taken after the norm.
        """
        ids = self.settings.get("aux_hidden_state_layer_ids")
        if ids is None:
            given = self.of_block("target_layer_ids")
            ids = [each + 1 for each in _whole_numbers(given, self.name)]
        return self._there(_whole_numbers(ids, self.name), total)

    def of_block(self, key: str) -> Any:
        """Return a setting of a block drafter, which its authors may store in a section of their configuration."""
        nested = self.settings.get("dflash_config")
        return (nested if isinstance(nested, dict) else {}).get(key, self.settings.get(key))

    def _there(self, ids: Sequence[int], last: int) -> tuple[int, ...]:
        if not ids or not all(0 <= each <= last for each in ids):
            raise UsageError(
                f"The head {self.name} uses the inputs of layers {', '.join(map(str, ids))}, but the target's"
                f" layers are 0 to {last}.",
                "Use it with the target it was trained for.",
            )
        return tuple(ids)

    def check_weights(self, identity: str, name: str) -> None:
        """Raise ``UsageError`` if its metadata says that it was trained for weights of another ``identity``."""
        made_for = self.settings.get("target_fingerprint")
        if isinstance(made_for, str) and made_for != identity:
            raise UsageError(
                f"The head {self.name} was trained for other weights than those of {name}.",
                "Use it with the target it was trained for, or add the option any-target: --drafter HEAD:any-target.",
            )

    def check(self, target: PreTrainedConfig, name: str) -> None:
        """Check that the configurations of head and target fit together.

        Raises:
            UsageError: The head is for another target. RunError: Its configuration is damaged.
        """
        text = text_config(target)
        if self.is_eagle or self.is_block:
            self._check_layer()
        self.layers(target)
        if self.kind == "assistant":
            layers_of_target(self.folder, self.name, target)
        for what, own, others in (
            ("hidden states", self._width(text.hidden_size), text.hidden_size),
            ("tokens", self.number("vocab_size", text.vocab_size), text.vocab_size),
        ):
            if own != others:
                size = "" if what == "tokens" else " of the size"
                raise UsageError(
                    f"The head {self.name} was trained for another target: for {what}{size} {own}, and {name} has"
                    f" {others}.",
                    "Choose a head of this target.",
                )
        verifier = self._part("speculators_config").get("verifier") or {}
        named, own_kinds = verifier.get("architectures"), target.architectures
        if named and own_kinds and not {*named} & {*own_kinds}:
            raise UsageError(
                f"The head {self.name} was trained for a {named[0]}, and {name} is a {own_kinds[0]}.",
                "Choose a head of this target.",
            )

    def _part(self, key: str) -> Mapping[str, Any]:
        part = self.settings.get(key)
        return part if isinstance(part, dict) else {}

    def _width(self, default: int | None = None) -> int:
        width = self.number("hidden_size", default)
        return self.number("backbone_hidden_size", self.number("target_hidden_size", width))

    def _check_layer(self) -> None:
        given, odd = {**self.layer_settings}, None
        self.layer  # noqa: B018 - or the refusal
        if given.get("num_hidden_layers", 1) != 1 and self.kind == "eagle":
            odd = f"it has {given['num_hidden_layers']} layers"
        elif given.get("hidden_act", "silu") not in ("silu", "swish"):
            odd = f"its activation is {given['hidden_act']!r}"
        elif not self.is_block and given.get("sliding_window") and given.get("use_sliding_window", True):
            odd = f"its attention has a sliding window of {given['sliding_window']} tokens"
        elif self.is_eagle and (self.settings.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
            odd = "it uses only the last hidden state"
        elif self.settings.get("layernorms") or self.settings.get("add_para_norm"):
            odd = "it normalizes its inputs, as HASS does"
        if odd is not None:
            raise UsageError(f"The head {self.name} is of a kind that is not supported: {odd}.", _READ)

    def with_layers(self, names: Sequence[str] = (), states: int = _STATES) -> nn.Module:
        """Make a head of decoder layers without weights, by the names of its tensors.

        Args:
            states: Hidden states that it reads at each position.
        """
        if self.kind == "assistant":
            with torch.device("meta"):
                return make_assistant(self.folder, self.name)
        layer, settings = self.layer, self.settings
        # A block drafter's own parts also have layers called gate_proj.
        own = ("markov_head.", "confidence_head.")
        biases = {
            name.split(".")[-2] for name in names if name.endswith(".bias") and not name.startswith(own)
        }
        for key, linear in (("attention_bias", ("q_proj", "k_proj", "v_proj")), ("mlp_bias", _MLP)):
            if getattr(layer, key):
                biases |= {*linear}
        norms = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        shape = EagleShape(
            states=states,
            width=self._width(),
            vocab=self.number("draft_vocab_size", layer.vocab_size),
            layer=layer,
            layers=self.number("num_hidden_layers", 1),
            embeds="embed_tokens.weight" in names,
            biases=frozenset(biases),
            head_norms=any("q_norm" in name for name in names),
            **{name: bool(settings.get(name)) for name in norms},
        )
        with torch.device("meta"):
            if self.is_block:
                return block_head(self, shape)
            if self.kind == "peagle":
                key = next((key for key in _MASKS if key in settings), _MASKS[0])
                return ParallelEagleHead(shape, self._ahead(), self._token(key, settings.get(key)))
            return EagleHead(shape) if self.kind == "eagle3" else Eagle1Head(shape)

    def _token(self, key: str, value: Any) -> int:
        if type(value) is not int or not 0 <= value < self.number("vocab_size"):
            raise RunError(f"The config.json of {self.name} is damaged: its {key} is no token.")
        return value

    def _ahead(self) -> int:
        """Return the number of tokens that P-EAGLE drafts in a forward pass, from the first proposal method."""
        methods = self._part("speculators_config").get("proposal_methods") or [{}]
        number = methods[0].get("speculative_tokens", _AHEAD) if isinstance(methods[0], dict) else None
        if type(number) is not int or number < 1:
            raise RunError(
                f"The config.json of {self.name} is damaged: its speculative_tokens is no whole number above 0."
            )
        return number

    def medusa(self, tensors: Mapping[str, torch.Tensor]) -> MedusaHeads:
        """Make Medusa heads without weights; their number follows from the tensors, or from the configuration."""
        count = self.number("num_heads", self.number("medusa_num_heads", 1))
        heads = [int(found[1]) for name in tensors if (found := re.match(r"blocks\.(\d+)\.", name))]
        projection = tensors.get("lm_heads.0.weight", torch.empty(1, 1))
        with torch.device("meta"):
            return MedusaHeads(
                1 + max(heads, default=count - 1),
                self.number(
                    "medusa_num_layers" if "medusa_num_heads" in self.settings else "num_hidden_layers", 1
                ),
                self.number("hidden_size", projection.shape[1]),
                self.number("truncated_vocab_size", self.number("vocab_size", len(projection))),
                biased=any(name.endswith(".bias") for name in tensors),
                shared=bool(self.settings.get("original_lm_head")),
            )


_MLP = ("gate_proj", "up_proj", "down_proj")

_READ = (
    "EAGLE, P-EAGLE, DFlash, DFlash 2, DSpark, Medusa and MTP heads and Gemma 4's assistants are supported."
)

_LAYER = (
    "attention_bias", "dtype", "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "mlp_bias",
    "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta",
    "torch_dtype", "vocab_size",
)  # fmt: skip


def _whole_numbers(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise RunError(f"The config.json of {name} is damaged: its layers are no list of whole numbers.")
    return value


def find_head(spec: ModelSpec, progress: Progress | None = None) -> HeadFiles | None:
    """Return the head in a folder or on the hub; ``None`` if it is not a head.

    Raises:
        UsageError: Nothing has that name, or the head's kind is not supported.
        RunError: Its configuration cannot be fetched or is damaged.
    """
    hub = None
    if spec.kind == "hub":
        hub = HubModel(spec.source, spec.revision, spec.name, progress)
        folder = hub.folder
    elif spec.kind == "packaged":
        folder = packaged_folder(spec.source)
    elif spec.kind == "folder":
        folder = Path(spec.source)
    else:
        return None
    settings = read_settings(folder, spec.name)
    kind = _kind(settings)
    if kind is None and _is_eagle_one(settings, folder, hub):
        kind = "eagle"
    if kind is None:
        return None
    if kind not in HEAD_KINDS:
        raise UsageError(f"The head {spec.name} is of a kind that is not supported: {kind}.", _READ)
    return HeadFiles(kind, spec.name, folder, settings, hub)


def _kind(settings: Mapping[str, Any]) -> str | None:
    """Return the kind of head that a configuration describes; ``None`` if it does not describe a head."""
    named = settings.get("speculators_model_type")
    if isinstance(named, str):
        return named
    if settings.get("model_type") in ASSISTANTS:
        return "assistant"
    architectures = settings.get("architectures")
    words = [str(settings.get("model_type", ""))]
    words += [str(each) for each in architectures] if isinstance(architectures, list) else []
    known = ("peagle", "eagle3", "eagle", "medusa", "dflash2", "dflash", "dspark", "mlp_?speculator")
    for kind in known:
        if any(re.search(kind, word, re.IGNORECASE) for word in words):
            masked = kind == "eagle3" and any(key in settings for key in _MASKS)
            return "peagle" if masked else kind.replace("?", "")
    if "medusa_num_heads" in settings:
        return "medusa"
    return "eagle3" if "draft_vocab_size" in settings else None


def _is_eagle_one(settings: Mapping[str, Any], folder: Path, hub: HubModel | None) -> bool:
    """Return whether a configuration is of an EAGLE-1 head, which its authors store as a Llama of one layer.

    It is if it has an option that only heads have, or if the names of the weights say so. If the weights are not
    fetched yet, it is if there is no tokenizer.
    """
    if settings.get("model_type") != "llama" or settings.get("num_hidden_layers") != 1:
        return False
    if "bias" in settings:
        return True
    if hub is not None:
        return not hub.has_tokenizer()
    try:
        if (folder / "model.safetensors").is_file():
            with safe_open(folder / "model.safetensors", "pt") as file:
                return "fc.weight" in file.keys()  # noqa: SIM118 - it is no dict
        if (folder / "pytorch_model.bin").is_file():
            # The names are plain bytes in the pickle, which is not run.
            with ZipFile(folder / "pytorch_model.bin") as archive:
                pickled = (each for each in archive.infolist() if each.filename.endswith("data.pkl"))
                return any(
                    b"fc.weight" in archive.read(each) for each in pickled if each.file_size <= _MOST_NAMES
                )
    except Exception:  # what parsers raise; loading it reports the damage
        return False
    return False
