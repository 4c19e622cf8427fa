"""Training heads: what is learnt is what the decoder drafts with, and cut off anywhere it comes to the same end."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_runs import Cli, Result, refusal
from msgspec import structs
from safetensors.torch import load_file
from tiny import save_tiny, tiny_llama, tiny_tokenizer
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specbench.backends.torch.head_scorers import EagleScorer, HeadScorer, MedusaScorer, OfTarget
from specbench.backends.torch.heads import MedusaHeads
from specbench.backends.torch.scorer import FittedLogits
from specbench.base.errors import RunError, SpecbenchError, UsageError
from specbench.bench.prompts import Prompt
from specbench.decoding.protocols import ForwardRequest
from specbench.generate import autoregressive_generate, speculative_generate
from specbench.models.drafters import load_drafter
from specbench.models.heads import TrainedHead, find_head, load_head
from specbench.models.target import Target, wrap_target
from specbench.options import LoadOptions
from specbench.specs.models import parse_model
from specbench.train import learner as learner_module
from specbench.train import result as result_module
from specbench.train import run as run_module
from specbench.train import texts as texts_module
from specbench.train.learner import KINDS, Learner, make_student
from specbench.train.lessons import Lesson, Teacher, make_batches, pad_batch, trainable_texts
from specbench.train.result import write_head
from specbench.train.run import Training
from specbench.train.settings import Measured, TrainingSettings
from specbench.train.state import read_state, write_state
from specbench.train.students import Metrics, soft_cross_entropy
from specbench.train.texts import Text, TextStore, store_for, write_texts

pytestmark = pytest.mark.usefixtures("own_cache")

DEPTH = 3
DRAFTED = torch.arange(0, 280, 2)
PLAIN = LoadOptions(dtype="float32")
PROMPTS = [
    Prompt(f"p{i}", "ab"[i % 2], (text,))
    for i, text in enumerate([
        "the thing", "and the king", "of the ring", "in the station", "a nation to", "the end", "is the", "on and on",
    ])
]  # fmt: skip
QUICK = TrainingSettings(
    tokens=200, answer_tokens=24, epochs=3, depth=DEPTH, batch_tokens=96, held_out=2, measured_tokens=16, measures=3,
    vocab=200,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny_llama(0, layers=3)
    model.requires_grad_(False)
    model.config.architectures = ["LlamaForCausalLM"]
    return model


@pytest.fixture(scope="module")
def easy() -> Target:
    """A target whose next token hangs on the last one, and hardly on any before."""
    model: Any = tiny_llama(0, layers=3)
    for layer in model.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.data *= 0.05
    return wrap_target(model, tiny_tokenizer(), name="easy", pack=False)


@pytest.fixture(scope="module")
def target(model) -> Target:
    return wrap_target(model, tiny_tokenizer(), name="tiny", pack=False)


def made_up(*lengths: int, start: int = 4) -> list[Text]:
    random = Random(3)
    return [
        Text(0, i, start, tuple(random.choices(range(280), k=length))) for i, length in enumerate(lengths)
    ]


def lesson_of(
    model: Any, student: Any, texts: Sequence[Text], drafted: torch.Tensor | None = DRAFTED
) -> Lesson:
    teacher = Teacher(model, drafted)
    return teacher.lesson(teacher.read(*pad_batch(texts, torch.device("cpu")), student.layers))


# -- what is learnt is what is drafted -------------------------------------------------------------


def states_of(model: Any, tokens: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        output = model(input_ids=torch.tensor([tokens]), output_hidden_states=True)
    return torch.stack([output.hidden_states[layer][0] for layer in layers], dim=1)


def decoders_rows(
    model: Any, student: Any, head: torch.Tensor, tokens: Sequence[int], behind: int
) -> torch.Tensor:
    """Logits of a draft behind ``tokens[: behind + 2]`` that follows the text, as the decoder gets them."""
    context, draft = tokens[: behind + 2], tokens[behind + 2 : behind + 1 + student.depth]
    fitted = FittedLogits(len(head), None)
    scorer: HeadScorer
    if student.kind in ("eagle", "mtp"):
        student.head.lm_head = torch.nn.Linear(head.shape[1], len(head), bias=False)
        student.head.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)
        scorer = EagleScorer(student.head, OfTarget(model.get_input_embeddings(), student.layers, fitted))
    else:
        heads = MedusaHeads(student.depth, 1, head.shape[1], len(head), shared=True)
        heads.load_state_dict({**student.tensors(), "lm_heads.0.weight": head})
        scorer = MedusaScorer(heads, OfTarget(None, (3,), fitted))
    scorer.begin()
    scorer.take_states(len(context) - 1, states_of(model, context[:-1], student.layers))
    return scorer.score(ForwardRequest(scorer, context, draft)).logits


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("kind", "every", "layers"),
    [
        *((kind, 1, 1) for kind in KINDS),
        *((kind, 3, 2) for kind in KINDS if kind != "medusa"),
        ("eagle", 1, 2),
    ],
)
def test_losses_are_those_of_what_the_decoder_drafts(model, kind, every, layers):
    """Position by position, draft by draft, with a pass of the decoder's scorer for each."""
    texts = made_up(19, 12)
    teacher = Teacher(model, DRAFTED)
    student = make_student(kind, model, teacher.head, DEPTH, 0, layers)
    student.every = every
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    lesson = lesson_of(model, student, texts)
    metrics = student(lesson)
    drafted = set(DRAFTED.tolist())
    losses: list[list[float]] = [[] for _ in range(DEPTH)]
    for text in texts:
        with torch.no_grad():
            whole = model(input_ids=torch.tensor([text.tokens])).logits[0]
        p = whole[:, DRAFTED].softmax(-1)
        for behind in range(text.start - 1, len(text.tokens) - 2):
            rows = decoders_rows(model, student, teacher.head, text.tokens, behind)
            for place in range(DEPTH):
                end = behind + 2 + place
                if end >= len(text.tokens) or text.tokens[end] not in drafted:
                    break
                losses[place].append(float(-(p[end - 1] * rows[place].log_softmax(-1)).sum()))
                right = rows[place].argmax() == p[end - 1].argmax()
                if kind != "medusa" and not right and (behind + int(lesson.ids.sum())) % every:
                    break
    assert metrics.counted.tolist() == [len(each) for each in losses]
    expected = torch.tensor([sum(each) / max(1, len(each)) for each in losses])
    torch.testing.assert_close(metrics.losses.detach(), expected, atol=1e-4, rtol=1e-4)
    assert metrics.counted[0] > 0
    metrics.losses.sum().backward()
    learning = [parameter for parameter in student.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in learning)


def test_cross_entropy_and_its_gradient_are_torchs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(600, 8, generator=generator, requires_grad=True)
    head, p = torch.randn(30, 8, generator=generator), torch.randn(50, 30, generator=generator).softmax(-1)
    rows = torch.randint(50, (600,), generator=generator)
    loss, right = soft_cross_entropy(hidden, head, p, rows, p.argmax(-1))
    (found,) = torch.autograd.grad(2 * loss, hidden)
    expected = torch.nn.functional.cross_entropy(hidden @ head.T, p[rows], reduction="sum")
    (gradient,) = torch.autograd.grad(2 * expected, hidden)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, gradient, atol=1e-5, rtol=1e-4)
    assert torch.equal(right, (hidden @ head.T).argmax(-1) == p[rows].argmax(-1))


def test_a_head_that_does_more_than_a_product_is_asked_itself(model):
    text = made_up(12)
    student = make_student("medusa", model, Teacher(model).head, DEPTH, 0)
    plain = lesson_of(model, student, text)
    hook = model.lm_head.register_forward_hook(lambda _module, _given, out: 3 * torch.tanh(out / 3))
    try:
        capped = lesson_of(model, student, text)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([text[0].tokens])).logits[0]
    finally:
        hook.remove()
    first = int((plain.places[0] >= 0).nonzero()[0])
    torch.testing.assert_close(capped.p[0], logits[first][DRAFTED].softmax(-1))
    assert not torch.allclose(plain.p, capped.p)


# -- texts and batches -----------------------------------------------------------------------------


def test_batches_hold_every_text_once_within_the_budget():
    texts = made_up(*Random(1).choices(range(6, 40), k=50), 90)
    for epoch in (0, 1):
        found = make_batches(texts, 80, 7, epoch)
        assert sorted(place for batch in found for place in batch) == list(range(51))
        for batch in found:
            longest = max(len(texts[place].tokens) for place in batch)
            assert len(batch) == 1 or longest * len(batch) <= 80
    assert make_batches(texts, 80, 7, 0) == make_batches(texts, 80, 7, 0) != make_batches(texts, 80, 7, 1)
    assert [len(text.tokens) for text in trainable_texts(made_up(5, 6, 50), 20, 3)] == [6, 20]


def test_texts_are_the_targets_own_and_written_once(target, monkeypatch):
    prompts = [[5, 9, 14], [30, 2], [1] * 600, [7, 7, 8, 1]]
    store = store_for(target, prompts, 6, 0)
    options: dict[str, Any] = {"answer_tokens": 6, "seed": 0}
    write_texts(target, prompts, store, enough=lambda written, _: written >= 18, **options)
    texts = store.read()
    assert list(texts) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert texts.pop((0, 2)).written == 0  # it does not fit
    for (_, place), text in texts.items():
        alone = autoregressive_generate(prompts[place], target, max_new_tokens=6)
        assert text.tokens == (*prompts[place], *alone.token_ids)
    write_texts(target, prompts, store, enough=lambda written, _: written >= 36, **options)
    assert set(store.read()) == {(number, place) for number in (0, 1) for place in range(4)}
    long = store_for(target, prompts[2:3], 6, 0)
    with pytest.raises(UsageError, match="None of the prompts fits"):
        write_texts(target, prompts[2:3], long, enough=lambda *_: False, **options)
    monkeypatch.setattr(texts_module, "GenerationRuns", None)
    write_texts(target, prompts, store, enough=lambda written, _: written >= 36, **options)
    assert store_for(target, prompts, 7, 0).folder != store.folder


def test_answers_that_had_not_ended_are_kept_apart(target, tmp_path):
    prompts = [[5, 9, 14], [30, 2]]
    store, cut = store_for(target, prompts, 40, 0), TextStore(tmp_path / "cut")
    enough = {"enough": lambda _, everything: everything >= 12}
    write_texts(target, prompts, store, answer_tokens=40, seed=0, cut=cut, **enough)
    assert not store.read()
    texts = cut.read()
    assert set(texts) == {(0, 0), (0, 1)}
    for (_, place), text in texts.items():
        alone = autoregressive_generate(prompts[place], target, max_new_tokens=40)
        assert text.tokens == (*prompts[place], *alone.token_ids[: text.written])
        assert 0 < text.written < 40


def test_a_disk_without_room_for_a_head_ends_a_training_that_goes_on_later(target, tmp_path, monkeypatch):
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(result_module, "write_bytes", full)
        said = refusal(training(target, tmp_path / "head").run, kind=RunError)
    assert "cannot be written (No space left on device)" in said
    assert said.endswith("Free some space, and add --resume.")
    training(target, tmp_path / "head", resume=True).run()
    assert story(tmp_path / "head")["measured"]


def test_a_line_cut_short_is_written_again(tmp_path):
    store = TextStore(tmp_path / "texts")
    first, second = made_up(8, 9)
    store.add([first])
    file = tmp_path / "texts" / "texts-0.jsonl"
    file.write_bytes(file.read_bytes() + b'{"round":0,"prompt":1,"st')
    assert list(store.read()) == [(0, 0)]
    store.add([second])
    assert store.read() == {(0, 0): first, (0, 1): second}


# -- the whole of it -------------------------------------------------------------------------------


class Watched:
    """Remembers what it is told, and ends the training where it is told to."""

    def __init__(self, ends_at: int = -1, *, writing: bool = False) -> None:
        self._left, self._writing = ends_at, writing
        self.measures: list[Measured] = []

    def _count(self, writing: bool = False) -> None:
        self._left -= writing == self._writing
        if self._left == 0:
            raise KilledError

    def update(self, stage: str, done: int, total: int | None, note: str, left_s: float | None) -> None:
        assert left_s is None or left_s >= 0
        self._count(writing=stage == "the target writes")

    def report(self, measured: Measured, best: bool) -> None:
        self.measures.append(measured)
        self._count()


class KilledError(BaseException):
    pass


def training(
    target: Target,
    out: Path,
    settings: TrainingSettings = QUICK,
    progress: Watched | None = None,
    **more: Any,
) -> Training:
    if progress is not None:
        more |= {"update": progress.update, "report": progress.report}
    return Training(target, PROMPTS, settings, out, source="mine", save_interval_s=0, **more)


FILES = {"config.json", "model.safetensors", "training.json"}


def story(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "training.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_learns_and_drafts_exactly(easy, tmp_path, kind):
    out = tmp_path / "head"
    watch = Watched()
    settings = replace(QUICK, kind=kind, epochs=12, tokens=300, learning_rate=5e-3)
    best = training(easy, out, settings, progress=watch).run()
    told = story(out)
    assert {path.name for path in out.iterdir()} == FILES
    first, last = told["loss"][0]["loss"], told["loss"][-1]["loss"]
    assert all(after < before for before, after in zip(first, last, strict=True))
    assert best.tokens_per_step == max(each["tokens_per_step"] for each in told["measured"])
    assert told["measured"][0]["step"] == 0
    assert told["target"]["fingerprint"] == easy.language_model.identity
    assert told["data"]["held_out"] == ["p6", "p7"]
    assert ("layer 2 and the final norm" in told["derived"]) == (kind != "medusa")
    assert set(told["measured"][0]["categories"]) == {"a", "b"}
    assert [each.tokens_per_step for each in watch.measures] == [
        each["tokens_per_step"] for each in told["measured"]
    ]
    if kind != "medusa":
        assert told["loss"][-1]["right"][0] > 0.3 > told["loss"][0]["right"][0]
        assert best.tokens_per_step > told["measured"][0]["tokens_per_step"]
    drafter = load_drafter(str(out), easy)
    for prompt in ([5, 9, 14], [30, 2, 44]):
        plain = autoregressive_generate(prompt, easy, max_new_tokens=30)
        found = speculative_generate(prompt, easy, drafter, gamma=3, max_new_tokens=30)
        assert found.token_ids == plain.token_ids


@pytest.mark.parametrize("kind", ["eagle", "medusa", pytest.param("mtp", marks=pytest.mark.slow)])
def test_cut_off_anywhere_it_ends_the_same(target, tmp_path, monkeypatch, kind):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = replace(QUICK, kind=kind)
    training(target, whole, settings).run()
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "other"))
    random, starts, resume = Random(5), 0, False
    while not (parts / "training.json").is_file() or (parts / "state").exists():
        starts += 1
        writing = starts < 4
        watch = Watched(random.randint(1, 100 if writing else 6), writing=writing) if starts < 14 else None
        try:
            training(target, parts, settings, resume=resume, progress=watch).run()
        except KilledError:
            resume = (parts / "state" / "begun.json").is_file()
    assert starts > 7
    expected, found = story(whole), story(parts)
    assert found["loss"] == expected["loss"]
    for before, after in zip(expected["measured"], found["measured"], strict=True):
        assert before | {"seconds": 0, "step_cost": 0} == after | {"seconds": 0, "step_cost": 0}
    first, second = (load_file(folder / "model.safetensors") for folder in (whole, parts))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_killed_while_its_state_is_removed_a_training_has_ended(target, tmp_path, monkeypatch):
    out = tmp_path / "head"

    def removed_in_part(folder: Path, **_: Any) -> None:
        (folder / "checkpoint.safetensors").unlink()
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(run_module.shutil, "rmtree", removed_in_part)
        with pytest.raises(KilledError):
            training(target, out, QUICK).run()
    before = (out / "model.safetensors").read_bytes()
    assert "has ended" in refusal(training, target, out, QUICK, resume=True, kind=UsageError)
    assert (out / "model.safetensors").read_bytes() == before


def test_half_a_file_of_a_killed_training_is_gone_at_its_end(target, tmp_path):
    out = tmp_path / "head"
    with pytest.raises(KilledError):
        training(target, out, QUICK, progress=Watched(1)).run()
    (out / ".model.safetensors.0123456789abcdef.partial").write_bytes(b"half")
    training(target, out, QUICK, resume=True).run()
    assert {path.name for path in out.iterdir()} == FILES


class Clock:
    """Time that passes only where work is done: so many seconds for each record of decoding and each step."""

    def __init__(
        self, patch: pytest.MonkeyPatch, *, writing: float, measuring: float, learning: float
    ) -> None:
        self.now, self._seconds = 0.0, {"writing": writing, "measuring": measuring, "learning": learning}
        self.spent = dict.fromkeys(self._seconds, 0.0)
        for module in (run_module, learner_module):
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        for module, what in ((texts_module, "writing"), (run_module, "measuring")):
            patch.setattr(module, "GenerationRuns", self._timed(what, module.GenerationRuns))
        gradients = Learner._backward

        def learnt(learner: Learner, reading: Any) -> Any:
            self.pass_by("learning")
            return gradients(learner, reading)

        patch.setattr(Learner, "_backward", learnt)

    def pass_by(self, what: str) -> None:
        self.now += self._seconds[what]
        self.spent[what] += self._seconds[what]

    def slow_down(self, factor: float) -> None:
        self._seconds = {what: factor * seconds for what, seconds in self._seconds.items()}

    def _timed(self, what: str, kind: type) -> type:
        clock = self

        class Timed(kind):  # type: ignore[misc]
            def __iter__(self) -> Any:
                for event in super().__iter__():
                    clock.pass_by(what)
                    yield event

        return Timed


@pytest.mark.parametrize(
    ("writing", "measuring", "learning", "slows"),
    [(3.0, 0.3, 3.0, False), (9.0, 3.0, 3.0, False), (3.0, 9.0, 10.0, False), (4.0, 0.3, 30.0, False),
     (3.0, 0.6, 3.0, True)],
    ids=["quick", "slow to write", "slow to measure", "slow to learn", "slow later"],
)  # fmt: skip
def test_minutes_hold_however_slow_the_machine_is(
    target, tmp_path, monkeypatch, writing, measuring, learning, slows
):
    """Five minutes, of which the target writes in 40%: a step or measure under way is all that may follow."""
    clock = Clock(monkeypatch, writing=writing, measuring=measuring, learning=learning)

    class Slowed(Watched):
        def update(self, stage: str, done: int, total: int | None, note: str, left_s: float | None) -> None:
            if stage == "training":
                assert left_s is not None
                assert not slows or left_s <= max(0.0, 300 - clock.now)
                if slows and done == 20:
                    clock.slow_down(5.0)

    settings = replace(QUICK, tokens=None, minutes=5.0, patience=100)
    training(target, tmp_path / "head", settings, progress=Slowed()).run()
    assert clock.spent["writing"] <= 0.4 * 300 + writing
    assert slows or clock.spent["learning"] >= 0.25 * 300
    assert clock.now <= 1.1 * 300 + learning + measuring
    measured = story(tmp_path / "head")["measured"]
    assert len(measured) >= 2
    assert measured[-1]["tokens"] > 0


def test_what_a_head_brings_is_held_against_what_its_drafts_cost():
    untrained = Measured(
        step=0, tokens=472, loss=None, tokens_per_step=1.03, accepted=[0.02, 0.0, 0.0, 0.0], categories={},
        seconds=0.0, step_cost=1.4,
    )  # fmt: skip
    assert untrained.speedup("eagle") < 1  # type: ignore[operator]
    assert structs.replace(untrained, step_cost=None).speedup("eagle") is None
    trained = structs.replace(untrained, accepted=[0.5, 0.5, 0.5, 0.5], tokens_per_step=1.94)
    # One to three drafts: 1.5 / 1.1, 1.75 / 1.2, 1.875 / 1.3.
    assert trained.speedup("eagle") == pytest.approx(1.75 / 1.2)
    assert trained.speedup("medusa") == pytest.approx(1.94 / 1.4)  # which cost as much as one


def test_more_minutes_may_be_given_later(target, tmp_path, monkeypatch):
    clock = Clock(monkeypatch, writing=3.0, measuring=0.3, learning=3.0)
    out = tmp_path / "head"
    short = replace(QUICK, tokens=None, minutes=1.0, patience=10_000)
    with pytest.raises(KilledError):
        training(target, out, short, progress=Watched(1)).run()
    counted = training(target, out, QUICK, resume=True)
    assert "was begun with another tokens" in refusal(counted.run, kind=UsageError)
    training(target, out, replace(short, minutes=3.0), resume=True).run()
    assert story(out)["settings"]["minutes"] == 3.0
    assert 2 * 60 < clock.now < 4 * 60


def test_a_place_weighs_what_share_of_drafts_gets_there(target, monkeypatch):
    texts = made_up(20, 20)
    learner = Learner(target, texts, QUICK)
    losses = torch.full((DEPTH,), 2.0, requires_grad=True)
    metrics = Metrics(losses, torch.zeros(DEPTH), torch.tensor([8, 4, 0]))
    monkeypatch.setattr(learner.student, "forward", lambda _lesson: metrics)
    learner._backward(learner._read(texts))
    assert losses.grad is not None
    torch.testing.assert_close(losses.grad, torch.tensor([1.0, 0.8 * 4 / 8, 0.0]))


def test_wide_targets_have_heads_that_learn_at_a_lower_rate():
    rates = [QUICK.rate(width) for width in (32, 576, 1152)]
    assert rates[0] == rates[1] == 2 * rates[2]
    assert replace(QUICK, learning_rate=0.1).rate(4096) == 0.1
    medusa = replace(QUICK, kind="medusa")
    assert medusa.rate(32) == medusa.rate(4096)


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_goes_on_from_a_head(easy, tmp_path, kind):
    first, second = tmp_path / "first", tmp_path / "second"
    settings = replace(QUICK, kind=kind, vocab=None, learning_rate=5e-3)
    best = training(easy, first, settings).run()
    start = head_in(first)
    settings = replace(settings, start=start.fingerprint, learning_rate=1e-9)
    training(easy, second, settings, start=start).run()
    told = story(second)
    assert told["measured"][0]["tokens_per_step"] == best.tokens_per_step
    assert told["start"]["training"]["steps"] == story(first)["steps"]
    assert "started from the head first" in told["derived"]
    assert (head_in(second).target_tokens is None) == (start.target_tokens is None)
    if start.target_tokens is not None:
        assert torch.equal(head_in(second).target_tokens, start.target_tokens)  # type: ignore[arg-type]


def head_in(folder: Path) -> TrainedHead:
    files = find_head(parse_model(str(folder)))
    assert files is not None
    return load_head(files)


def altered(
    head: TrainedHead, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> TrainedHead:
    """A head with other settings and tensors."""
    files = replace(head.files, settings={**head.files.settings, **settings})
    return replace(head, files=files, tensors={**head.tensors, **tensors})


def test_what_cannot_be_gone_on_from_is_refused(model, target, easy, tmp_path):
    teacher = Teacher(model, DRAFTED)
    for kind in ("eagle", "medusa"):
        student = make_student(kind, model, teacher.head, DEPTH, 0)
        write_head(tmp_path / kind, student, target, teacher.head, DRAFTED)
    eagle, medusa = (head_in(tmp_path / kind) for kind in ("eagle", "medusa"))
    plain = replace(QUICK, vocab=None)
    assert "is of kind medusa" in refusal(
        training, target, tmp_path / "x", plain, start=medusa, kind=UsageError
    )
    wide = altered(eagle, {}, {"layers.0.mlp.up_proj.weight": torch.zeros(40, 32)})
    for start, depth, odd in (
        (medusa, DEPTH + 1, f"blocks.{DEPTH}.layers.0.weight"),
        (medusa, DEPTH - 1, f"blocks.{DEPTH - 1}.layers.0.weight"),
        (wide, DEPTH, "layers.0.mlp.up_proj.weight is 40×32"),
        (altered(eagle, {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}, {}), DEPTH, "layers 0, 1, 1"),
    ):
        kind = "eagle" if start.files.kind == "eagle3" else start.files.kind
        other = replace(QUICK, kind=kind, vocab=None, depth=depth, start=start.fingerprint)
        said = refusal(training, target, tmp_path / "x", other, start=start, kind=UsageError)
        assert odd in said
    assert not (tmp_path / "x").exists()
    assert "was trained for" in refusal(training, easy, tmp_path / "y", plain, start=eagle, kind=UsageError)


def test_it_ends_when_nothing_is_gained(target, tmp_path):
    out = tmp_path / "head"
    training(target, out, replace(QUICK, learning_rate=1e-9, measures=9, patience=2, epochs=9)).run()
    assert len(story(out)["measured"]) == 3


OF_OTHER_CLASSES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
    "deepseek_v3": {
        "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8,
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "num_key_value_heads": 4,
    },
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2},
}  # fmt: skip
"""Settings of tiny targets; the last has no decoder layers that an MTP layer can be made of."""


@pytest.mark.parametrize("model_type", OF_OTHER_CLASSES)
def test_an_mtp_layer_is_of_the_targets_class_where_that_can_be(tmp_path, model_type):
    kind = CONFIG_MAPPING[model_type]
    sizes = {
        "vocab_size": 290, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(kind(**{**sizes, **OF_OTHER_CLASSES[model_type]})).eval()
    model.generation_config.do_sample = False
    target = wrap_target(model, tiny_tokenizer(), name="other", pack=False)
    teacher = Teacher(model, DRAFTED)
    student: Any = make_student("mtp", model, teacher.head, DEPTH, 0)
    of_llama = model_type == "gpt2"
    assert (student.started_from is None) == of_llama
    assert (student.settings()["transformer_layer_config"]["model_type"] == "llama") == of_llama
    write_head(tmp_path / "head", student, target, teacher.head, DRAFTED)
    drafter: Any = load_drafter(str(tmp_path / "head"), target, PLAIN)
    context, draft = [5, 19, 2, 77, 11], [8, 30]
    drafter.begin(context)
    drafter.scorer.take_states(4, states_of(model, context[:-1], drafter.traits.layers))
    found = drafter.scorer.score(ForwardRequest(drafter.scorer, context, draft)).logits
    expected = decoders_rows(model, student, teacher.head, [*context, *draft, 0], 3)
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.02)  # stored in bfloat16
    plain = autoregressive_generate(context, target, max_new_tokens=12)
    assert (
        speculative_generate(context, target, drafter, gamma=3, max_new_tokens=12).token_ids
        == plain.token_ids
    )


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_shares_no_memory_with_the_target(model, kind):
    """Training changes the student's weights, and must not change the target's."""
    student = make_student(kind, model, Teacher(model, DRAFTED).head, DEPTH, 0)
    there = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert not there & {tensor.data_ptr() for tensor in student.parameters() if tensor.requires_grad}


def test_a_head_for_other_weights_is_refused_unless_told(model, target, tmp_path):
    folder = tmp_path / "head"
    teacher = Teacher(model, DRAFTED)
    student = make_student("eagle", model, teacher.head, DEPTH, 0)
    write_head(folder, student, target, teacher.head, DRAFTED)
    other = wrap_target(tiny_llama(1, layers=3), tiny_tokenizer(), name="other", pack=False)
    assert "trained for other weights than those of other" in refusal(
        load_drafter, str(folder), other, kind=UsageError
    )
    assert load_drafter(str(folder), other, LoadOptions(any_target=True)).traits.vocabulary
    half = wrap_target(tiny_llama(0, layers=3, dtype=torch.bfloat16), tiny_tokenizer(), pack=False)
    assert load_drafter(str(folder), half).traits.vocabulary
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for name, tensor in tensors.items() if "proj" in name} == {torch.bfloat16}


REFUSED: dict[str, tuple[Callable[[Target, Path], object], str]] = {
    "layers": (
        lambda target, out: training(target, out, replace(QUICK, layers=4)),
        "A head of 4 layers is larger than its target (3).",
    ),
    "layers of Medusa": (
        lambda _target, _out: replace(QUICK, kind="medusa", layers=1),
        "A head of kind medusa has no layers.",
    ),
    "layers of a head": (
        lambda _target, _out: replace(QUICK, start="a head", layers=1),
        "Leave --layers and --vocab out.",
    ),
    "both": (lambda _target, _out: replace(QUICK, minutes=3), "are both given"),
    "neither": (lambda _target, _out: replace(QUICK, tokens=None), "are both missing"),
    "no time": (lambda _target, _out: replace(QUICK, tokens=None, minutes=0.0), "0 minutes"),
    "vocabulary": (
        lambda target, out: training(target, out, replace(QUICK, vocab=300)),
        "300 tokens is larger",
    ),
    "few prompts": (lambda target, out: Training(target, PROMPTS[:2], QUICK, out), "at least 3 prompts"),
    "nothing to go on with": (lambda target, out: training(target, out, resume=True), "no training in"),
    "no folder": (lambda target, out: out.write_text("x") and training(target, out), "is no folder"),
    "not empty": (
        lambda target, out: (out.mkdir(), (out / "a").touch(), training(target, out))[2],
        "is not empty",
    ),
    "short answers": (
        lambda target, out: training(target, out, replace(QUICK, batch_tokens=2)).run(),
        "too short to learn from",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_said_in_a_sentence(target, tmp_path, case):
    call, message = REFUSED[case]
    assert message in refusal(call, target, tmp_path / "head", kind=SpecbenchError)


def test_a_training_goes_on_as_it_was_begun(target, tmp_path):
    out = tmp_path / "head"
    with pytest.raises(KilledError):
        training(target, out, progress=Watched(2)).run()
    assert "has not ended" in refusal(training, target, out, kind=UsageError)
    other = training(target, out, replace(QUICK, epochs=9), resume=True)
    assert "was begun with another epochs" in refusal(other.run, kind=UsageError)
    for file in (tmp_path / "cache").rglob("texts-*.jsonl"):
        file.unlink()
    assert "missing in the cache" in refusal(training(target, out, resume=True).run, kind=RunError)
    (out / "state" / "begun.json").write_text("{", encoding="utf-8")
    assert "is damaged" in refusal(training(target, out, resume=True).run, kind=RunError)


def test_one_process_trains_into_a_folder(target, tmp_path):
    first, second = (training(target, tmp_path / "head") for _ in range(2))
    with first._lock():
        assert "Another process trains" in refusal(second.run, kind=RunError)


def test_a_state_is_whole_or_refused(tmp_path):
    path = tmp_path / "a" / "state.safetensors"
    write_state(path, {"x": torch.arange(3)}, {"step": 4})
    tensors, facts = read_state(path)
    assert (tensors["x"].tolist(), facts) == ([0, 1, 2], {"step": 4})
    path.write_bytes(path.read_bytes()[:40])
    assert "is damaged" in refusal(read_state, path, kind=RunError)


# -- the command line ------------------------------------------------------------------------------


@pytest.fixture
def train(cli, tmp_path, monkeypatch) -> Cli:
    """The command, which measures rarely."""
    settings = partial(TrainingSettings, measures=2, measured_tokens=16)
    monkeypatch.setattr(import_module("specbench.cli.train"), "TrainingSettings", settings)
    folder = save_tiny(tmp_path / "tiny", layers=3)
    lines = [json.dumps({"id": each.id, "category": each.category, "turns": each.turns}) for each in PROMPTS]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines), encoding="utf-8")

    def trained(*words: object) -> Result:
        common = ("--target", folder, "--dtype", "float32", "--prompts", tmp_path / "mine.jsonl", "-n", 16)
        return cli("train", *common, *words)

    return trained


def test_train_on_the_command_line(cli, train, tmp_path):
    out = tmp_path / "head"
    short = ("--tokens", 60)
    told = train(*short, "--out", out)
    assert told.code == 0, told.err
    assert "tokens per step on held-out prompts" in told.out
    assert "SLOWS decoding" in told.out  # a target this small is as quick as its head
    assert f"--start {out}" in told.out
    assert "--drafter" not in told.out
    assert "untrained" in told.err
    common = ("--target", tmp_path / "tiny", "--dtype", "float32", "the thing", "-n", 12, "--json")
    plain = cli("generate", *common, "--drafter", "none").json()
    found = cli("generate", *common, "--drafter", out, "--gamma", 2).json()
    assert found["text"] == plain["text"]
    assert found["drafted"] > 0
    train(*short, "--out", out).refused(2, "is not empty")
    train(*short, "--out", out, "--resume").refused(2, "has ended")
    again = train(*short, "--start", out, "--out", tmp_path / "again", "--json", "--quiet").json()
    assert again["best"]["tokens_per_step"] >= 1
    train(*short, "--start", tmp_path / "tiny", "--out", tmp_path / "x").refused(2, "is no trained head")
    train("--out", tmp_path / "x").refused(2, "Give either --tokens or --minutes")
    train(*short, "--out", tmp_path / "x", "--dtype", "int8").refused(2, "int8 target")
    train(*short, "--out", tmp_path / "x", "--prompts", "chat").refused(2, "also in a benchmark set")
    train(*short, "--out", tmp_path / "x", "--prompts", tmp_path / "none.jsonl").refused(2, "no prompt file")
    assert not (tmp_path / "x").exists()
