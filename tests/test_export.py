"""Settings in the words of other engines: their names, what cannot be said there, and `transformers` run for real."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cli_runs import refusal
from stored_runs import Drafter, change_run, kept_run, write_exact, write_run
from tiny import save_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from specbench.base.errors import UsageError
from specbench.export import registry
from specbench.export.engine import HEAD_TITLES
from specbench.export.output import as_file, export_fastest
from specbench.export.setting import RunSettings, Setting
from specbench.models.training_metadata import TrainingMetadata
from specbench.options import ModelOptions, SamplingOptions
from specbench.recipe import Recipe
from specbench.results.results import load_results
from specbench.specs.drafters import SmallModel, parse_drafter
from specbench.specs.models import ModelSpec
from specbench.specs.policies import parse_policy

ROOT = Path(__file__).parent.parent
ENGINES = {name: registry.load_engine(name) for name in registry.ENGINES}
KNOWN = json.loads(Path(__file__).with_name("engine_options.json").read_text(encoding="utf-8"))
HUB = ModelSpec("hub", "Qwen/Qwen2.5-Coder-1.5B-Instruct")


def setting(
    drafter: str,
    rule: str = "fixed:gamma=4",
    *,
    target: ModelSpec = HUB,
    dtype: Any = "bfloat16",
    temperature: float = 0.0,
    **changes: Any,
) -> Setting:
    recipe = Recipe(
        target, parse_drafter(drafter), parse_policy(rule), ModelOptions(dtype=dtype),
        sampling=SamplingOptions(temperature=temperature),
    )  # fmt: skip
    return replace(Setting(recipe, 4), **changes)


# -- names -------------------------------------------------------------------------------------------

DRAFTERS = (
    "lookup", "lookup:n=any,min=2", "suffix", "suffix:keep", "self:layers=3", "org/small", "org/small@v1", "mtp",
    "lookup+mtp", "lookup+org/small", "lookup:n=4+org/small",
)  # fmt: skip
FIXED = {"gamma_from": "given by --gamma"}
SETTINGS = [
    setting(drafter, rule, **(FIXED if not rule.startswith("fixed:gamma=4") else {}), **changes)
    for drafter in DRAFTERS
    for rule in (
        "fixed:gamma=4",
        "fixed:gamma=4,verification=block",
        "auto",
        "confidence:threshold=0.6,max=9",
        "heuristic:gamma=3",
        "dynamic-tree",
    )
    for changes in (
        {},
        {
            "temperature": 0.7,
            "dtype": "int8",
            "drafter_dtype": "int8",
            "target": ModelSpec("hub", "org/big", "v2"),
        },
    )
    if parse_policy(rule).applies(parse_drafter(drafter))
]


def flat(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values, those in groups too."""
    for name, value in options.items():
        yield name, value
        if isinstance(value, Mapping):
            yield from flat(value)


def test_the_engines_are_those_that_are_pinned():
    assert list(ENGINES) == list(KNOWN)
    assert {name: engine.version for name, engine in ENGINES.items()} == {
        name: known["version"] for name, known in KNOWN.items()
    }


@pytest.mark.parametrize("name", ENGINES)
def test_every_name_is_one_of_that_version(name):
    engine, known = ENGINES[name], KNOWN[name]
    groups = {"generate", "generation_config"}
    assert not set(known["names"]) & set(known.get("removed", ()))
    tried, used = set(), set()
    for each in SETTINGS:
        if not engine.supports(each.drafter):
            continue
        options = dict(flat(engine.export(each).options))
        assert set(options) - groups <= set(known["names"]), each
        for option, words in known.get("values", {}).items():
            assert set(str(options.get(option, words[0])).split(",")) <= set(words)
        tried.add(type(each.drafter))
        used |= set(options) - groups
    assert tried == set(engine.drafters)
    assert len(used) >= 4


def test_transformers_has_these_names():
    assert transformers.__version__ == ENGINES["transformers"].version
    known = KNOWN["transformers"]
    config = transformers.GenerationConfig()
    assert {name: getattr(config, name) for name in known["mtp_defaults"]} == known["mtp_defaults"]
    elsewhere = {"assistant_model", "assistant_tokenizer", "tokenizer", *known["newer"]["names"]}
    of_config = set(known["names"]) - elsewhere
    assert of_config <= set(config.to_dict()) | set(vars(config))


# -- what each engine gets ---------------------------------------------------------------------------

CASES = {
    "model": setting("org/small"),
    "model, sampled": setting(
        "org/small@v1", temperature=0.7, target=ModelSpec("hub", "org/big", "v2"), drafter_dtype="int8"
    ),
    "model, block verification": setting("org/small", "fixed:gamma=4,verification=block", temperature=0.7),
    "model, int8 target": setting("org/small", dtype="int8"),
    "model, auto": setting("org/small", "auto", gamma_from="guessed"),
    "model, tree": setting("org/small", "dynamic-tree", gamma_from="guessed"),
    "model, confidence": setting("org/small", "confidence:threshold=0.6,max=9", gamma_from="guessed"),
    "model, heuristic": setting("org/small", "heuristic:gamma=3", gamma_from="guessed"),
    "lookup": setting("lookup:n=5,min=2", temperature=0.7),
    "lookup, built-in target": setting("lookup", target=ModelSpec("builtin", "smollm2-135m"), dtype="int4"),
    "suffix": setting("suffix:n=10"),
    "layers": setting("self:layers=3"),
    "MTP layer": setting("mtp"),
    "MTP layer, sampled": setting("mtp", "fixed:gamma=4,verification=block", temperature=0.7),
    "MTP layer in a cascade": setting("lookup+mtp"),
    "MTP layer of speculators": setting("org/head", head=TrainingMetadata(kind="mtp")),
    "cascade": setting("lookup+org/small"),
    "head": setting("org/head", head=TrainingMetadata(kind="eagle3")),
    "head, parallel": setting("org/head", head=TrainingMetadata(kind="peagle")),
    "model, parallel": setting("org/small", head=TrainingMetadata(kind="pard")),
    "head, block": setting("org/head", head=TrainingMetadata(kind="dflash")),
    "head, block, drawn in turn": setting("org/head", head=TrainingMetadata(kind="dspark"), temperature=0.7),
    "head in a cascade": setting("lookup+org/head", head=TrainingMetadata(kind="eagle3")),
    "head, trained here": setting("org/head", head=TrainingMetadata(kind="eagle")),
}


def words(text: str) -> list[str]:
    """A command line as a shell reads it."""
    return shlex.split(text.replace("\\\n", " "))


@pytest.mark.parametrize("name", ENGINES)
def test_settings_on_every_engine(name, snapshot):
    engine, shown, seen = ENGINES[name], [], set()
    for title, each in CASES.items():
        shown.append(f"=== {title}")
        try:
            export = engine.export(each)
        except UsageError as error:
            shown.append(str(error))
            continue
        shown += [export.text, *(f"needs: {each}" for each in export.needs)]
        notes = [f"{kind}: {each}" for kind in ("missing", "differs") for each in getattr(export, kind)]
        shown += [note for note in notes if note not in seen]  # what is said of every setting once
        seen.update(notes)
        if name == "transformers":
            compile(export.text, name, "exec")
    snapshot("\n".join(shown))


@pytest.mark.parametrize("name", ENGINES)
def test_what_cannot_be_expressed_is_refused(name):
    engine = ENGINES[name]
    refused = ["ngram", "self:int8", "ngram+org/small", "lookup+self:int8"]
    refused += ["self:layers=2,int8", "lookup|org/small", *(["self:layers=2"] * (name != "transformers"))]
    for drafter in refused:
        message = refusal(engine.export, setting(drafter), kind=UsageError)
        assert message.startswith(f"{engine.title} does not support the drafter {parse_drafter(drafter)}.")


def test_names_of_strangers_stay_words():
    """A shell and Python read them as one name each."""
    odd = ModelSpec("hub", "a b'; touch x #\"$(y)")
    for name in ("vllm", "sglang"):
        assert odd.name in words(ENGINES[name].export(setting("lookup", target=odd)).text)
    text = ENGINES["transformers"].export(setting("lookup", target=odd)).text
    assert f"TARGET = {odd.name!r}" in text
    compile(text, "x", "exec")


# -- which setting -----------------------------------------------------------------------------------


def test_the_best_of_a_run_with_its_interval():
    found = RunSettings(load_results(kept_run("qwen2.5-coder-int4"))).all()[0]
    assert str(found.drafter) == "qwen2.5-coder-0.5b:dtype=int4"
    assert (found.drafter_dtype, found.dtype, found.temperature) == ("int4", "bfloat16", 0.0)
    assert found.measured is not None
    assert found.measured.best
    assert "2.07× [1.69, 2.51]" in str(found.measured)
    assert (str(found.policy), found.gamma) == ("auto", 4)
    assert "1.94× [1.61, 2.31]" in str(ENGINES["vllm"].nearest(found).measured)


def test_one_that_is_named():
    df = load_results(kept_run("qwen2.5-coder-int4"))
    for name in ("qwen2.5-coder-0.5b (int4)@8", "qwen2.5-coder-0.5b (int4) γ=8"):
        found = RunSettings(df).get(name)
        assert (found.gamma, found.gamma_from) == (8, "")
        assert found.measured is not None
        assert not found.measured.best
    assert "Choose plain," in refusal(RunSettings(df).get, "lookup@2", kind=UsageError)
    assert "not speculative decoding" in refusal(RunSettings(df).get, "plain", kind=UsageError)


def test_requests_side_by_side_go_by_the_mean_accepted_length():
    df = load_results(kept_run("qwen2.5-coder-by-batch"))
    found = RunSettings(df).all()[0]
    assert "the mean accepted length" in found.gamma_from
    assert 1 <= found.gamma <= 8


def test_folders_of_a_run_are_left_to_be_named(cli, tmp_path):
    write_run(tmp_path / "run", drafters=(Drafter("small (int8)", 0.8, 0.2),), gammas=(2,), target="big")
    for name in ENGINES:
        text = cli("export", tmp_path / "run", "--to", name).out
        places = ("big.gguf", "small.gguf") if name == "llama.cpp" else ("/path/to/big", "/path/to/small")
        assert all(place in text for place in places)


def ranked_run(folder: Path, **options: Any) -> Path:
    """Two drafters, of which most engines have the slower one only; that at 0.6 of the speed of the other."""
    speeds = {
        name: {f"code-{n}": [factor * (10.0 + n % 4)] for n in range(8)}
        for name, factor in {"plain": 1.0, "self:int8@2": 2.0, "lookup@2": 1.2, "lookup@4": 1.1}.items()
    }
    return write_exact(folder, speeds, **options)


def test_what_an_engine_does_not_have_leaves_the_fastest_that_it_has(tmp_path):
    df = load_results(ranked_run(tmp_path / "run"))
    settings = RunSettings(df).all()
    assert [str(each.drafter) for each in settings] == ["self:int8", "lookup", "lookup"]
    found, made = export_fastest(ENGINES["vllm"], settings)
    assert made.options["--speculative-config"]["method"] == "ngram"
    assert found.measured is not None
    assert found.measured.label == "lookup γ=2"
    assert found.instead_of is not None
    assert found.instead_of.label == "self:int8 γ=2"
    assert "self:int8 γ=2: 2.00× [2.00, 2.00]" in as_file(ENGINES["vllm"], found, made, "run")
    message = refusal(export_fastest, ENGINES["mlx-lm"], settings, kind=UsageError)
    assert "none of the measured drafters: self:int8, lookup" in message


def test_a_provisional_verdict_is_not_deployed_as_a_sure_one(tmp_path):
    df = load_results(ranked_run(tmp_path / "run", disturbed=("machine-busy",)))
    found = RunSettings(df).all()[0]
    assert found.measured is not None
    assert (found.measured.label, found.measured.verdict) == ("self:int8 γ=2", "cannot tell")
    assert not found.measured.best
    fitting, made = export_fastest(ENGINES["vllm"], RunSettings(df).all())
    text = as_file(ENGINES["vllm"], fitting, made, "run")
    assert "not clear that it is faster than plain decoding" in " ".join(text.replace("#", "").split())


def test_what_tune_ranks_goes_before_speeds_on_other_prompts(tmp_path):
    ranking = ["lookup@4", "self:int8@2", "plain", "lookup@2"]
    tuning = {"predicted": {}, "raced": ranking[:2], "left_out": {}, "ranking": ranking, "verdict": "faster"}
    df = load_results(ranked_run(tmp_path / "run", tuning=tuning))
    settings = RunSettings(df).all()
    found = [(each.measured.label, each.measured.best) for each in settings if each.measured]
    assert found == [("lookup γ=4", True), ("self:int8 γ=2", False), ("lookup γ=2", False)]
    assert export_fastest(ENGINES["vllm"], settings)[0].instead_of is None


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("kind", [*HEAD_TITLES, "new"])
def test_every_engine_loads_a_kind_of_head_or_says_why_not(name, kind):
    engine, known = ENGINES[name], KNOWN[name]
    here, support = setting("org/head", head=TrainingMetadata(kind=kind)), engine.heads.get(kind)
    if support is None:
        assert "cannot load the head in org/head: no" in refusal(engine.export, here, kind=UsageError)
        return
    export = engine.export(here)
    options = dict(flat(export.options))
    assert set(options) - {"generate"} <= set(known["names"])
    method = next(option for option, words in known["values"].items() if support.method in words)
    assert options[method] == support.method


AS_HERE = {
    "enable_adaptive_verification": False,
    "rejection_sample_method": "standard",
    "--spec-draft-n-min": 0,
    "--spec-draft-p-min": 0.0,
}
"""What an export may leave to an engine's default."""


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *((name, "defaults") for name in ("vllm", "sglang", "llama.cpp")),
        *((name, "mtp_defaults") for name, known in KNOWN.items() if "mtp_defaults" in known),
    ],
)
def test_defaults_that_differ_are_written_out(name, key):
    """Those that a version was read to have, for an MTP layer or a head that something else would otherwise size."""
    drafter, head = ("mtp", None) if key == "mtp_defaults" else ("org/head", TrainingMetadata(kind="dspark"))
    options = dict(flat(ENGINES[name].export(setting(drafter, head=head, temperature=0.7)).options))
    for option, default in KNOWN[name][key].items():
        assert option in KNOWN[name]["names"]
        left = key == "defaults" and option in AS_HERE and AS_HERE[option] == default
        assert option in options or left, option


def test_a_run_tells_of_its_heads(tmp_path):
    for name, kind, method in (("head", "eagle", "eagle3"), ("mtp", "mtp", "mtp")):
        write_run(tmp_path / name, drafters=(Drafter(name, 0.8, 0.1),), gammas=(2,), repeats=1)
        run = load_results(change_run(tmp_path / name, heads={name: {"kind": kind, "tokens": 9}}))
        options = ENGINES["vllm"].export(RunSettings(run).all()[0]).options["--speculative-config"]
        assert options["method"] == method
        assert options.get("model") == ("/path/to/head" if name == "head" else None)


# -- the command -------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_the_command_says_what_it_is_from(cli):
    result = cli("export", kept_run("qwen2.5-coder-int4"), "--to", "vllm")
    assert result.code == 0
    assert "vLLM does not have qwen2.5-coder-0.5b (int4) auto: 2.07×" in result.err
    for said in (
        "# Made for vLLM",
        "γ=4: 1.94× [1.61, 2.31]",
        "# Not supported: ",
        "# To verify: ",
    ):
        assert said in result.out
    code = [line for line in result.out.splitlines() if line and not line.startswith("#")]
    assert words("\n".join(code))[:2] == ["vllm", "serve"]
    assert all(len(line) <= 100 for line in result.out.splitlines() if line.startswith("#"))


def test_the_heading_has_the_figure_of_what_is_exported(cli):
    """Not the one of a policy, or of another γ, that is not."""
    int4, batched = (kept_run(f"qwen2.5-coder-{name}") for name in ("int4", "by-batch"))

    def heading(run: Path | str) -> str:
        found = cli("export", run, "--to", "vllm").out
        return " ".join(line.lstrip("# ") for line in found.splitlines() if line.startswith("#"))

    assert "Measured: qwen2.5-coder-0.5b (int4) γ=8" in heading(f"{int4}:qwen2.5-coder-0.5b (int4) γ=8")
    assert "auto: 2.07×" in heading(int4).partition("in place of")[2]
    assert "was not measured" in heading(batched)


def test_the_documented_table_is_the_code():
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w[\w.-]+)` \| (.+?) \| (.+?) \| (.+?) \|$", page, flags=re.MULTILINE)
    assert rows == [
        (name, f"{each.title} {each.version}", each.describe_drafters(), ", ".join(("fixed", *each.policies)))
        for name, each in ENGINES.items()
    ]


# -- run for real ------------------------------------------------------------------------------------

PROMPT = "the cat and the dog and the cat and the dog and"


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    """A folder with a tiny target and a tiny drafter of one tokenizer."""
    folder = tmp_path_factory.mktemp("pair")
    save_tiny(folder / "big", layers=3)
    save_tiny(folder / "small", layers=1)
    return folder


def performed(text: str) -> tuple[list[int], int, int]:
    """The tokens that an exported program makes, and how many it counts in how many passes."""
    printed: list[str] = []
    text = text.replace("max_new_tokens=256", "max_new_tokens=40").replace("Why is the sky blue?", PROMPT)
    names: dict[str, Any] = {"print": lambda *said: printed.append(" ".join(map(str, said)))}
    exec(compile(text, "export", "exec"), names)  # noqa: S102
    counted = re.fullmatch(r"(\d+) tokens in (\d+) passes of the target", printed[-1])
    new = names["output"][0, names["inputs"]["input_ids"].shape[1] :].tolist()
    return (new, int(counted[1]), int(counted[2])) if counted else (new, 0, 0)


def plainly(folder: Path) -> list[int]:
    """What `generate` says without any drafts."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "big")
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "big", dtype=torch.float32)
    said = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(
        said, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, do_sample=False, max_new_tokens=40)
    return list(output[0, inputs["input_ids"].shape[1] :].tolist())


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        ("lookup", "fixed:gamma=4"),
        ("small", "fixed:gamma=4"),
        ("small", "confidence:threshold=0.01,max=5"),
        ("small", "heuristic:gamma=3"),
        ("big", "fixed:gamma=4"),
        ("self:layers=2", "fixed:gamma=4"),
    ],
)
def test_transformers_gives_the_same_tokens(pair, monkeypatch, drafter, rule):
    monkeypatch.chdir(pair)
    here = setting(drafter, rule, target=ModelSpec("hub", "big"), dtype="float32")
    tokens, new, passes = performed(ENGINES["transformers"].export(here).text)
    assert tokens == plainly(pair)
    if drafter == "big":  # every draft is right: 40 tokens in eight times four and one, and the prompt's pass
        assert (new, passes) == (40, 8)
    elif not drafter.startswith("self"):
        assert 0 < passes <= new == len(tokens)


def test_a_program_names_its_models_at_its_beginning_and_says_which_to_fill_in(pair, monkeypatch):
    """Runs keep no paths: what is a folder's name has to be found; a hub id, or a built-in model's, stands."""
    monkeypatch.chdir(pair)
    local = SmallModel(ModelSpec("folder", "/path/to/small-1b"))
    made = setting("lookup", target=ModelSpec("hub", "big"), dtype="float32")
    text = ENGINES["transformers"].export(replace(made, recipe=replace(made.recipe, drafter=local))).text
    assert "from_pretrained('" not in text
    assert "# replace by a local folder or hub id" in text
    tokens, *_ = performed(text.replace("'/path/to/small-1b'", repr(str(pair / "small"))))
    assert tokens == plainly(pair)
    text = ENGINES["transformers"].export(setting("lookup", target=ModelSpec("builtin", "smollm2-135m"))).text
    assert "TARGET = 'HuggingFaceTB/SmolLM2-135M-Instruct'" in text
    assert f"TARGET = {HUB.name!r}\n" in ENGINES["transformers"].export(setting("lookup")).text
