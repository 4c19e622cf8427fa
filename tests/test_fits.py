"""Does a drafter fit a target? Public configurations, and the mistakes that people make, found without weights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from head_files import (
    VOCAB,
    WIDTH,
    block_settings,
    block_tensors,
    conditional_tensors,
    eagle_one_settings,
    eagle_one_tensors,
    eagle_settings,
    eagle_tensors,
    flash_two_settings,
    medusa_settings,
    medusa_tensors,
    midlayer,
    mtp_settings,
    mtp_tensors,
    parallel_settings,
    parallel_tensors,
    spark_settings,
    speculators_settings,
    write_head,
)
from test_heads import WRONG as REFUSED
from tiny import save_tiny, tiny_tokenizer

from specbench.export.fits import Fit, fit_of, read_facts
from specbench.specs.drafters import SmallModel, parse_drafter
from specbench.specs.models import parse_model


def of(target: Path, drafter: str | Path) -> Fit:
    spec = parse_drafter(str(drafter))
    assert isinstance(spec, SmallModel)
    return fit_of(read_facts(parse_model(str(target))), spec)


def takers(fit: Fit) -> set[str]:
    """The engines that take it."""
    return {name.rpartition(" ")[0] or name for name, *_ in fit.engines}


# -- public configurations ---------------------------------------------------------------------------


def sizes(hidden: int, layers: int, vocab: int, kind: str = "Llama") -> dict[str, Any]:
    """Of a target."""
    return {
        "architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(), "hidden_size": hidden,
        "num_hidden_layers": layers, "vocab_size": vocab,
    }  # fmt: skip


def llama_head(hidden: int, vocab: int, name: str = "LlamaForCausalLMEagle3", **more: Any) -> dict[str, Any]:
    layer = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 32,
        "vocab_size": vocab,
    }
    return {"architectures": [name], "model_type": "llama", "num_hidden_layers": 1, **layer, **more}


def speculator(kind: str, target: str, own: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    verifier = {"name_or_path": target, "architectures": own["architectures"]}
    return {
        "architectures": [f"{kind.capitalize()}Speculator"], "speculators_model_type": kind, "draft_vocab_size": 32000,
        "speculators_config": {"verifier": verifier, "proposal_methods": [{"speculative_tokens": 5}]},
        "transformer_layer_config": llama_head(own["hidden_size"], own["vocab_size"]), **more,
    }  # fmt: skip


def dflash(
    hidden: int, vocab: int, ids: list[int], name: str = "DFlashDraftModel", **more: Any
) -> dict[str, Any]:
    section = {"mask_token_id": 151669, "target_layer_ids": ids}
    layers = {"num_hidden_layers": 5, "block_size": 16, "dflash_config": section}
    return llama_head(hidden, vocab, name) | {"model_type": "qwen3", **layers, **more}


TARGETS = {
    "Llama-3.1-8B-Instruct": sizes(4096, 32, 128256),
    "Llama-3.3-70B-Instruct": sizes(8192, 80, 128256),
    "vicuna-7b-v1.3": sizes(4096, 32, 32000),
    "Qwen3-1.7B": sizes(2048, 28, 151936, "Qwen3"),
    "Qwen3-4B": sizes(2560, 36, 151936, "Qwen3"),
    "Qwen3-8B": sizes(4096, 36, 151936, "Qwen3"),
    "Qwen2.5-Coder-7B-Instruct": sizes(3584, 28, 152064, "Qwen2"),
    "gpt-oss-20b": sizes(2880, 24, 201088, "GptOss"),
    "DeepSeek-V3": sizes(7168, 61, 129280, "DeepseekV3"),
    "MiMo-V2.6-Pro": sizes(6144, 70, 152576, "MiMoV2"),
    "Kimi-K2.5": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": sizes(7168, 61, 163840),
    },
}
LINES = [1, 9, 17, 25, 33]
FOUR = {"specbench", "vLLM", "SGLang", "llama.cpp"}
MODELS = FOUR | {"transformers", "mlx-lm"}
PUBLIC: list[tuple[str, str, dict[str, Any], str, set[str] | str, str]] = [
    # target; drafter; its config.json; what it is; which engines take it, or why it does not fit; what is in doubt
    ("Llama-3.1-8B-Instruct", "EAGLE3-LLaMA3.1-Instruct-8B",
     llama_head(4096, 128256, "LlamaForCausalLM", draft_vocab_size=32000), "EAGLE-3", FOUR, "architectures are LlamaF"),
    ("Llama-3.3-70B-Instruct", "EAGLE3-LLaMA3.3-Instruct-70B",
     llama_head(6144, 128256, draft_vocab_size=32000, target_hidden_size=8192), "EAGLE-3", FOUR, "sglang#21272"),
    ("Llama-3.1-8B-Instruct", "EAGLE-LLaMA3.1-Instruct-8B",
     llama_head(4096, 128256, "LlamaForCausalLM", bias=True), "EAGLE-1", {"specbench", "vLLM"}, "flags of EAGLE-3"),
    ("vicuna-7b-v1.3", "EAGLE-LLaMA3.1-Instruct-8B",
     llama_head(4096, 128256, "LlamaForCausalLM", bias=True), "EAGLE-1", "tokens 128256", ""),
    ("Qwen3-8B", "Qwen3-8B-speculator.eagle3", speculator("eagle3", "Qwen/Qwen3-8B", TARGETS["Qwen3-8B"]),
     "EAGLE-3 head, in the format of `speculators`", {"specbench", "vLLM", "llama.cpp"}, ""),
    ("Qwen3-4B", "Qwen3-8B-speculator.eagle3", speculator("eagle3", "Qwen/Qwen3-8B", TARGETS["Qwen3-8B"]),
     "EAGLE-3", "hidden states of the size 4096", "names Qwen/Qwen3-8B as its target: it may have been made for o"),
    ("Qwen3-8B", "Qwen3-8B-speculator.peagle",
     speculator("peagle", "Qwen/Qwen3-8B", TARGETS["Qwen3-8B"], mask_token_id=151669), "P-EAGLE", {"specbench", "vLLM"},
     ""),
    ("Qwen3-8B", "Qwen3-8B-speculator.dflash",
     speculator("dflash", "Qwen/Qwen3-8B", TARGETS["Qwen3-8B"], mask_token_id=151669, block_size=16,
                aux_hidden_state_layer_ids=[2, 10, 18, 26, 34]),
     "DFlash", {"specbench", "vLLM"}, ""),
    ("gpt-oss-20b", "gpt-oss-20b-speculator.eagle3",
     speculator("eagle3", "openai/gpt-oss-20b", TARGETS["gpt-oss-20b"], architectures=["Eagle3DraftModel"],
                eagle_aux_hidden_state_layer_ids=None), "EAGLE-3", {"specbench", "vLLM", "llama.cpp"}, ""),
    ("Kimi-K2.5", "kimi-k2.5-eagle3", llama_head(7168, 163840, draft_vocab_size=32000), "EAGLE-3", FOUR, ""),
    ("Qwen3-1.7B", "Qwen3-4B-DFlash-b16", dflash(2560, 151936, LINES), "DFlash", "target's layers are 0 to 28", ""),
    ("MiMo-V2.6-Pro", "MiMo-V2.6-Pro-DFlash",
     dflash(6144, 152576, [0, 15, 31, 47, 69], target_hidden_size=6144), "DFlash", FOUR | {"transformers"}, ""),
    ("Qwen3-8B", "dspark_qwen3_8b_block7",
     dflash(4096, 151936, LINES, "Qwen3DSparkModel", target_layer_ids=LINES, mask_token_id=151669, block_size=7),
     "DSpark", FOUR, ""),
    ("Qwen3-8B", "PARD-Qwen3-0.6B", sizes(1024, 28, 151936, "Qwen3") | {"pard_token": 151670}, "PARD",
     {"specbench", "vLLM"}, "nothing shows that both have"),
    ("Qwen3-8B", "Qwen3-0.6B", sizes(1024, 28, 151936, "Qwen3"), "small model (Qwen3ForCausalLM)", MODELS, ""),
    ("Qwen2.5-Coder-7B-Instruct", "Qwen2.5-Coder-0.5B-Instruct", sizes(896, 24, 151936, "Qwen2"), "small model",
     "It has 151,936 logits, where the target has 152,064, and there is no tokenizer", ""),
    ("DeepSeek-V3", "DeepSeek-V3-DRAFT-0.6B", sizes(896, 24, 129280, "Qwen2"), "small model", MODELS, ""),
    ("Llama-3.1-8B-Instruct", "llama3-8b-accelerator",
     {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}, "trained head",
     "is of a kind that is not supported: mlp_speculator", ""),
    ("Qwen3-8B", "bge-small", {"architectures": ["BertModel"], "model_type": "bert"}, "small model",
     "no causal language model, but a BertModel", ""),
]  # fmt: skip
"""Fields of the config.json of public models, as far as they matter here."""


@pytest.mark.smoke
@pytest.mark.parametrize(("target", "name", "settings", "title", "expected", "doubt"), PUBLIC)
def test_public_configurations(tmp_path, target, name, settings, title, expected, doubt):
    for folder, config in ((target, TARGETS[target]), (name, settings)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    fit = of(tmp_path / target, tmp_path / name)
    assert title in fit.title
    assert doubt in " ".join(fit.doubts)
    assert "cannot be read: only config.json was compared" in " ".join(fit.doubts)
    if isinstance(expected, str):
        assert expected in " ".join(fit.faults)
        assert not fit.engines
    else:
        assert not fit.faults
        assert takers(fit) == expected
        reasons = [reason for _, reason in fit.refused]
        assert len(reasons) == len(MODELS) - len(expected)


# -- files with tensors ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """Of three layers."""
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny-instruct", layers=3)


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "EAGLE-3": (speculators_settings(), eagle_tensors()),
    "EAGLE-3 of its authors": (eagle_settings(), midlayer(eagle_tensors())),
    "EAGLE-1": (eagle_one_settings(), eagle_one_tensors()),
    "P-EAGLE": (parallel_settings(), parallel_tensors()),
    "DFlash": (block_settings(), block_tensors()),
    "DFlash 2": (flash_two_settings(), conditional_tensors("dflash2")),
    "DSpark": (spark_settings(), conditional_tensors("dspark")),
    "Medusa": (medusa_settings(), medusa_tensors()),
    "MTP": (mtp_settings(), mtp_tensors()),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_heads_of_every_layout_fit(tmp_path, target, name):
    """Those are the files that the tests of heads decode with."""
    fit = of(target, write_head(tmp_path / "head", *LAYOUTS[name]))
    assert fit.title.startswith(name.partition(" of")[0])
    assert not fit.faults
    assert fit.engines[0][1] == f"--drafter {tmp_path / 'head'}"


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "an EAGLE-1 head under the name of EAGLE-3": (
        eagle_settings(draft_vocab_size=VOCAB), eagle_one_tensors(),
        "tensors are those of EAGLE-1, but by its config.json it is EAGLE-3 (architectures: LlamaForCausalLMEagle3)",
    ),
    "an EAGLE-3 head under the name of a Llama": (
        eagle_one_settings(bias=False), midlayer(eagle_tensors(drafted=None)),
        "tensors are those of EAGLE-3, but by its config.json it is EAGLE-1 (architectures: LlamaForCausalLM)",
    ),
    "another size": (medusa_settings(hidden_size=64), medusa_tensors(), "hidden states of the size 64"),
    "another size, which only tensors show": (
        medusa_settings(), {"blocks.0.layers.0.weight": eagle_tensors()["fc.weight"]}, f"should have {WIDTH} by its",
    ),
    "another class": (
        speculators_settings(speculators_config={"verifier": {"architectures": ["Qwen3ForCausalLM"]}}),
        eagle_tensors(), "for a Qwen3ForCausalLM, and tiny-instruct is a LlamaForCausalLM",
    ),
    "states that are not named": (
        eagle_settings((0, 1)), eagle_tensors(), f"fc.weight has {3 * WIDTH} inputs, and should have {2 * WIDTH}",
    ),
    "a map for another vocabulary": (
        eagle_settings(), eagle_tensors() | {"t2d": eagle_tensors()["t2d"][:-3]}, f"t2d is for {VOCAB - 3} tokens",
    ),
    "latent attention": (
        eagle_settings(kv_lora_rank=8), eagle_tensors(), "not supported: its attention is latent",
    ),
    "a damaged number": (eagle_settings(hidden_size="wide"), eagle_tensors(), "hidden_size is missing or has an inv"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_found(tmp_path, target, name):
    settings, tensors, fault = WRONG[name]
    fit = of(target, write_head(tmp_path / "head", settings, tensors))
    assert fault in " ".join(fit.faults)
    assert not fit.engines


UNSEEN = {"a tensor is missing", "a token beyond", "an MTP layer without weights"}
"""What only the weights show."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_loading_refuses_does_not_fit(tmp_path, target, case):
    settings, tensors, _ = REFUSED[case]
    assert (not of(target, write_head(tmp_path / "head", settings, tensors)).faults) == (case in UNSEEN)


def test_what_names_tell_is_a_doubt(tmp_path, target):
    """The target is called tiny-instruct."""
    settings = speculators_settings()

    def doubts(name: str, *, verifier: str | None = None, card: str = "") -> str:
        own = {**settings, "speculators_config": {"verifier": {"name_or_path": verifier}}}
        folder = write_head(tmp_path / name, own, eagle_tensors())
        (folder / "README.md").write_text(card, encoding="utf-8")
        fit = of(target, folder)
        assert not fit.faults
        return " ".join(doubt for doubt in fit.doubts if "may have been" in doubt)

    assert not doubts("a", verifier="org/tiny-instruct")
    assert not doubts("b", verifier="org/Tiny-Instruct-FP8")
    assert "names org/tiny as its target: it may have been made for other" in doubts("c", verifier="org/tiny")
    assert "made for other weights" in doubts("d", verifier="org/huge-instruct")
    assert not doubts("e", card="---\nbase_model: org/tiny-instruct\n---\nbase_model: org/tiny\n")
    assert "names org/tiny as its" in doubts("f", card="---\nlicense: mit\nbase_model:\n- org/tiny\n---\n")
    assert not doubts("head")


def test_a_head_without_an_output_layer_is_a_doubt(tmp_path, target):
    tensors = eagle_tensors(drafted=None)
    del tensors["lm_head.weight"]
    fit = of(target, write_head(tmp_path / "head", eagle_settings(draft_vocab_size=VOCAB), tensors))
    assert not fit.faults
    assert "sglang#27908" in " ".join(fit.doubts)


def test_tokens_of_a_small_model(tmp_path, target):
    same = of(target, save_tiny(tmp_path / "same"))
    assert ("tokens", "the target's") in same.rows
    assert takers(same) == MODELS
    assert not same.doubts
    assert "no smaller than the target's" in of(tmp_path / "same", target).doubts[0]
    other = save_tiny(tmp_path / "other")
    tiny_tokenizer(special_tokens=("<other>", "<b>", "<c>")).save_pretrained(other)
    fit = of(target, other)
    assert any(label == "tokens" and text.startswith("others; it has about 9") for label, text in fit.rows)
    assert takers(fit) == {"specbench", "vLLM", "transformers"}
    assert "use_heterogeneous_vocab" in next(
        needs for name, _, needs in fit.engines if name.startswith("vLLM")
    )
    (other / "tokenizer.json").unlink()
    fit = of(target, other)
    assert "No tokenizer.json in other: nothing shows" in fit.doubts[0]
    assert not fit.faults
    (other / "tokenizer.json").write_text('{"model": {"vocab": {"x": 0}}}', encoding="utf-8")
    assert of(target, other).faults == ["It has hardly any of the target's tokens."]


def test_layers_of_the_checkpoint(target):
    assert "tiny-instruct has no MTP layer in a known layout" in of(target, "mtp").faults[0]


def test_only_small_files_and_headers_come_from_the_hub(tmp_path, target, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(eagle_settings()), encoding="utf-8")
    asked: list[str] = []

    def headers(repository: str, *, revision: str | None) -> Any:
        asked.append(repository)
        tensors = {
            name: SimpleNamespace(dtype="F32", shape=[*each.shape]) for name, each in eagle_tensors().items()
        }
        return SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=tensors)})

    def fetch(*_: Any, allow_patterns: list[str], **__: Any) -> str:
        assert not any("safetensors" in each and "index" not in each for each in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", headers)
    fit = of(target, "org/head")
    assert (fit.faults, asked) == ([], ["org/head"])
    assert fit.facts is not None
    assert fit.facts.memory() == pytest.approx(
        4 * sum(each.numel() for each in eagle_tensors().values()), rel=0.01
    )
    monkeypatch.delattr(huggingface_hub, "get_safetensors_metadata")  # as a network that fails
    fit = of(target, "org/head")
    assert "cannot be read" in fit.doubts[-1]
    assert fit.facts is not None
    assert fit.facts.memory("int8") is None


# -- the command -------------------------------------------------------------------------------------


def test_the_command(cli, tmp_path, target):
    head = write_head(tmp_path / "head", speculators_settings(), eagle_tensors())
    found = cli("drafters", "--target", target, head)
    assert found.code == 0
    said = " ".join(found.out.split())
    for part in (
        "head: EAGLE-3 head, in the format of `speculators`",
        "verdict fits, as far as config.json and headers tell",
        "reads hidden states before the target's layers 0, 1, 2 of 3",
        f"drafts 40 of the target's {VOCAB} tokens",
        '"method": "eagle3"',
        "SGLang 0.5.23 no: cannot load the head in",
        "weights, MB stored float32 bfloat16 int8 int4",
    ):
        assert part in said
    missing = cli("drafters", "--target", target, head, "mtp")
    assert missing.code == 1
    assert "verdict does not fit" in " ".join(missing.out.split())
    cli("drafters", head).refused(2, "drafters --target MODEL DRAFTER")
    cli("drafters", "--target", target).refused(2, "Name both")
    cli("drafters", "--target", target, "lookup").refused(2, "The drafter lookup is no model.")
    cli("drafters", "--target", target, tmp_path / "nothing").refused(2, "There is no such file or folder")
    cli("drafters", "--target", tmp_path, head).refused(2, "is no model")
    (tmp_path / "a.gguf").touch()
    cli("drafters", "--target", target, tmp_path / "a.gguf").refused(2, "a.gguf is a GGUF file")


def test_names_of_strangers_do_not_steer_a_terminal(cli, tmp_path, target):
    named = {
        "architectures": ["Eagle3\x1b[31m[bold]x"],
        "speculators_config": {"verifier": {"name_or_path": "o/\x1b[2J"}},
    }
    found = cli(
        "drafters", "--target", target, write_head(tmp_path / "h", eagle_settings(**named), eagle_tensors())
    )
    assert found.code == 0
    assert "\x1b" not in found.out


def test_torch_is_not_imported(tmp_path, target):
    head = write_head(tmp_path / "head", speculators_settings(), eagle_tensors())
    program = (
        "import sys; from specbench.cli import run;"
        f" code = run(['drafters', '--target', {str(target)!r}, {str(head)!r}]);"
        " sys.exit(code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0
