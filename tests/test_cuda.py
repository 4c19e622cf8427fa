"""On a CUDA device outputs are those of the CPU, for every drafter, cache and batch. Skipped without one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from head_files import few_head, few_tokens
from test_batches_exact import HEADS, NEW, prompts
from tiny import tiny_language_model, tiny_llama

from specbench import load_drafter, wrap_target
from specbench.backends.torch.scorer import Scorer
from specbench.decoding.clocks import peak_memory
from specbench.decoding.protocols import Drafter
from specbench.decoding.records import Generation
from specbench.decoding.sampling import Sampling
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.model import ModelDrafter
from specbench.generate import GenerationRun
from specbench.generate_many import GenerationRuns
from specbench.models.target import Target
from specbench.options import CacheKind
from specbench.policies import build_policy

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

ASKED = prompts()[:12]
RULES = ("fixed:gamma=3", "auto", "svip")
TREES = ("static-tree", "dynamic-tree:nodes=5")
SPECS = ("lookup", "suffix", "ngram:top-k=2", "self:layers=1", "lookup+self:layers=1", "lookup|suffix")
SAMPLINGS = (
    Sampling(),
    Sampling(0.8),
    Sampling(temperature=1.0, top_k=5, top_p=0.9, repetition_penalty=1.2),
)


def target_on(device: str, cache: CacheKind = "dynamic") -> Target:
    return wrap_target(few_tokens().to(device), cache=cache, pack=False)


def drafter_on(device: str, name: str, target: Target, folder: Path, cache: CacheKind = "dynamic") -> Drafter:
    """A smaller model, perhaps behind lookup, a head, or a drafter without weights of its own."""
    if name in HEADS:
        return few_head(folder / name, name, target)
    if not name.endswith("model"):
        return load_drafter(name, target)
    scorer = Scorer(tiny_llama(vocab_size=9, layers=1, seed=2).to(device), cache)
    model = ModelDrafter(scorer, "model")
    return CascadeDrafter(LookupDrafter(), model) if "+" in name else model


def alone(
    prompt: list[int], target: Target, drafter: Drafter | None = None, rule: str = "fixed:gamma=3",
    sampling: Sampling | None = None,
) -> Generation:  # fmt: skip
    policy = None if drafter is None else build_policy(rule)
    run = GenerationRun(
        prompt, target, drafter, policy=policy, sampling=sampling or Sampling(), seed=7, max_new_tokens=NEW
    )
    assert all(True for _ in run)
    return run.result()


@pytest.fixture(autouse=True)
def generator_as_before() -> Iterator[None]:
    with torch.random.fork_rng():
        yield


@pytest.mark.parametrize(
    ("drafter", "rule", "cache"),
    [
        *product(("model", "lookup+model"), RULES, ("dynamic", "preallocated", "static", "compiled")),
        *product(("model",), TREES, ("dynamic",)),
        *product((*SPECS[:-1], *HEADS), RULES[:2], ("dynamic",)),
        (SPECS[-1], RULES[0], "dynamic"),
    ],
)
def test_drafts_leave_the_output_as_it_is(drafter, rule, cache, tmp_path):
    """Outputs are those of plain decoding on the CPU, and some drafts were accepted."""
    target, cpu, accepted = target_on(DEVICE, cache), target_on("cpu"), 0
    made = drafter_on(DEVICE, drafter, target, tmp_path, cache)
    for prompt in ASKED:
        found = alone(prompt, target, made, rule)
        assert found.token_ids == alone(prompt, cpu).token_ids
        accepted += sum(step.accepted for step in found.steps)
    assert accepted > 0


@pytest.mark.parametrize("page", [None, 16])
def test_requests_of_a_batch_have_the_outputs_they_have_alone(tmp_path: Path, page: int | None):
    target, cpu = target_on(DEVICE), target_on("cpu")
    names = ("model", *SPECS[:-1], *HEADS)
    drafters = [None, *(drafter_on(DEVICE, name, target, tmp_path) for name in names)]
    runs = []
    for number, prompt in enumerate(prompts()):
        drafter = drafters[number % len(drafters)]
        policy = None if drafter is None else build_policy(RULES[number % 2])
        runs.append(GenerationRun(prompt, target, drafter, policy=policy, max_new_tokens=NEW))
    many = GenerationRuns(runs, max_batch=6, max_tokens_per_pass=64, page=page)
    for prompt, made in zip(prompts(), many.results(), strict=True):
        assert isinstance(made, Generation), made
        assert many.factory is not None
        assert many.factory.why_not_batched is None
        assert made.token_ids == alone(prompt, cpu).token_ids


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_seed_gives_the_tokens_of_the_cpu(sampling, tmp_path):
    sides = [(target := target_on(at), drafter_on(at, "model", target, tmp_path)) for at in (DEVICE, "cpu")]
    for prompt in ASKED:
        found, expected = (alone(prompt, *side, sampling=sampling).token_ids for side in sides)
        assert found == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_decodes_in_half_precision(dtype, tmp_path):
    target = wrap_target(few_tokens().to(DEVICE, dtype), pack=False)
    found = alone(ASKED[1], target, drafter_on(DEVICE, "model", target, tmp_path))
    assert len(found.token_ids) == NEW
    assert all(step.times.verify_s > 0 for step in found.steps)


def test_commands_run_on_it(models, cli, tmp_path):
    pair = ("--target", models / "target", "--drafter", models / "small", "--device", DEVICE)
    one = cli("generate", "Count to", *pair, "-n", 8, "--debug")
    assert one.code == 0, one.err
    for cache in ("dynamic", "static"):
        swept = cli(
            "sweep", *pair, "--gamma", "1,2", "--cache", cache, "-n", 6, "--limit", 1, "--repeats", 1,
            "--out", tmp_path / cache,
        )  # fmt: skip
        assert swept.code == 0, swept.err
    checked = cli("check", *pair, "-n", 8, "--limit", 2)
    assert checked.code == 0, checked.err + checked.out


def test_peak_memory_is_the_devices():
    language_model = tiny_language_model()
    held = sum(each.nbytes for each in language_model.model.to(DEVICE).parameters())
    assert peak_memory(DEVICE) >= held
