"""Which engine has which kind of trained head, under which name; and if not, why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KINDS: Mapping[str, str] = {
    "eagle": "EAGLE-3",
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
    "eagle-1": "EAGLE-1",
    "dflash": "DFlash",
    "medusa": "Medusa",
    "pass": "PaSS",
}
"""What the kinds of heads are called that results tell of; ``eagle`` is EAGLE-3 from ``specbench train``."""


@dataclass(frozen=True)
class HeadSupport:
    """A kind of head that an engine reads.

    Attributes:
        method: Its own name for it.
        needs: What has to be done to the head's files first; empty for nothing.
        speculators: Whether it reads such heads in the form of `speculators` too.
    """

    method: str
    needs: str = ""
    speculators: bool = True


@dataclass(frozen=True)
class NoHeadSupport:
    """A kind of head that an engine does not read.

    Attributes:
        why: What is to be said of the engine, going on behind "which".
    """

    why: str


def _none(why: str) -> Mapping[str, NoHeadSupport]:
    """An engine without any."""
    return dict.fromkeys(KINDS, NoHeadSupport(why))


_PASS = NoHeadSupport("reads no PaSS, whose form is specbench's own")
SPECULATORS = NoHeadSupport(
    "reads no head in the form of `speculators`, which is what specbench train writes"
)
"""Of an engine that reads heads as their authors write them alone."""

_OPENVINO = NoHeadSupport(
    "reads such a head only as a model in OpenVINO's own form, and no conversion was tried"
)


def _authors(kind: str) -> str:
    return f"The head as the authors of {kind} write it: the form of `speculators` is not read there."


HEADS: Mapping[str, Mapping[str, HeadSupport | NoHeadSupport]] = {
    "transformers": _none("has no trained heads, for its assistant is a whole model"),
    "vllm": {
        "eagle": HeadSupport("eagle3"),
        "eagle3": HeadSupport("eagle3"),
        "peagle": HeadSupport("eagle3"),
        "eagle-1": HeadSupport("eagle"),
        "dflash": HeadSupport("dflash"),
        "medusa": NoHeadSupport("has no Medusa any more, as 0.32 had"),
        "pass": _PASS,
    },
    "sglang": {
        "eagle": SPECULATORS,
        "eagle3": HeadSupport("EAGLE3", _authors("EAGLE-3"), speculators=False),
        "peagle": NoHeadSupport("has no P-EAGLE, for its EAGLE3 drafts one token after the other"),
        "eagle-1": NoHeadSupport(
            "reads no EAGLE-1 head whose config.json names LlamaForCausalLM, as its authors write it"
        ),
        "dflash": HeadSupport("DFLASH", _authors("DFlash"), speculators=False),
        "medusa": NoHeadSupport("has no Medusa heads"),
        "pass": _PASS,
    },
    "llama.cpp": {
        "eagle": NoHeadSupport(
            "was not seen to read an EAGLE-3 head of several layers, as specbench train makes them"
        ),
        "eagle3": HeadSupport(
            "draft-eagle3",
            "The head as a GGUF file: convert_hf_to_gguf.py HEAD --target-model-dir TARGET, of one decoder layer.",
        ),
        "peagle": NoHeadSupport("has no P-EAGLE"),
        "eagle-1": NoHeadSupport("has EAGLE-3 alone of EAGLE's kinds"),
        "dflash": NoHeadSupport("was not seen to convert a DFlash head as its authors write it"),
        "medusa": NoHeadSupport("has no Medusa heads"),
        "pass": _PASS,
    },
    "tensorrt-llm": {
        "eagle": SPECULATORS,
        "eagle3": HeadSupport("Eagle3", _authors("EAGLE-3"), speculators=False),
        "peagle": NoHeadSupport("has no P-EAGLE"),
        "eagle-1": NoHeadSupport("has EAGLE-3 alone of EAGLE's kinds"),
        "dflash": NoHeadSupport("has no DFlash in this version"),
        "medusa": NoHeadSupport("has no Medusa heads where trtllm-serve runs PyTorch, its default"),
        "pass": _PASS,
    },
    "mlx-lm": _none("has no trained heads, for its drafter is a whole model"),
    "openvino": {
        "eagle": _OPENVINO,
        "eagle3": _OPENVINO,
        "peagle": NoHeadSupport("has no P-EAGLE"),
        "eagle-1": NoHeadSupport("has EAGLE-3 alone of EAGLE's kinds"),
        "dflash": _OPENVINO,
        "medusa": NoHeadSupport("has no Medusa heads"),
        "pass": _PASS,
    },
}
"""By engine and kind. Read in the released packages (transformers 5.23.0, vLLM 0.33.0, SGLang 0.5.23, mlx-lm 0.32.2,
OpenVINO GenAI 2026.4.1.0), of TensorRT-LLM in ``_torch/models/modeling_auto.py`` and ``llmapi/llm_args.py`` of its
repository, of llama.cpp in its pull request 18039."""
