"""Training heads: what is learnt is what the decoder drafts with, and a training that was cut off goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from random import Random
from typing import Any

import pytest
import torch
from cli_runs import Cli, refusal
from tiny import tiny_llama, tiny_tokenizer

from specbench.backends.torch.head_scorers import EagleScorer, HeadScorer, MedusaScorer, OfTarget
from specbench.backends.torch.heads import MedusaHeads
from specbench.backends.torch.scorer import FittedLogits
from specbench.base.errors import RunError, UsageError
from specbench.bench.prompts import Prompt, load_prompts
from specbench.decoding.protocols import ForwardRequest
from specbench.generate import autoregressive_generate
from specbench.models.drafters import load_drafter
from specbench.models.target import Target, wrap_target
from specbench.models.training_metadata import read_metadata
from specbench.options import LoadOptions
from specbench.train import TrainingSettings, texts, trainer
from specbench.train.batches import Batches, make_batches
from specbench.train.texts import Text, texts_file, training_prompts, write_texts
from specbench.train.trainer import STUDENTS, train_head, write_head

pytestmark = pytest.mark.usefixtures("own_cache")

DEPTH = 3
DRAFTED = torch.arange(0, 280, 2)
WORDS = [
    "the thing",
    "and the king",
    "of the ring",
    "in the station",
    "a nation to",
    "the end",
    "is the",
    "on and on",
]
PROMPTS = [Prompt(f"p{i}", "ab"[i % 2], (text,)) for i, text in enumerate(WORDS)]
QUICK = TrainingSettings(tokens=60, answer_tokens=16, depth=DEPTH, batch_tokens=96, repeats=2)


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny_llama(0, layers=3)
    model.requires_grad_(False)
    return model


@pytest.fixture(scope="module")
def target(model) -> Target:
    return wrap_target(model, tiny_tokenizer(), name="tiny", pack=False)


def made_up(*lengths: int, start: int = 4) -> list[Text]:
    random = Random(3)
    return [
        Text(round=0, prompt=i, start=start, tokens=tuple(random.choices(range(280), k=length)))
        for i, length in enumerate(lengths)
    ]


def student_of(model: Any, kind: str) -> Any:
    torch.manual_seed(0)
    return STUDENTS[kind](model, DRAFTED, DEPTH)


# -- what is learnt is what is drafted -------------------------------------------------------------


def states_of(model: Any, tokens: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        output = model(input_ids=torch.tensor([tokens]), output_hidden_states=True)
    return torch.stack([output.hidden_states[layer][0] for layer in layers], dim=1)


def decoders_rows(model: Any, student: Any, tokens: Sequence[int], behind: int) -> torch.Tensor:
    """Logits of a draft behind ``tokens[: behind + 2]`` that follows the text, as the decoder gets them."""
    context, draft = tokens[: behind + 2], tokens[behind + 2 : behind + 1 + student.depth]
    fitted, (vocab, width) = FittedLogits(len(student.rows), None), student.rows.shape
    scorer: HeadScorer
    if isinstance(student.head, MedusaHeads):
        heads = MedusaHeads(student.depth, 1, width, vocab, shared=True)
        heads.load_state_dict({**student.tensors(), "lm_heads.0.weight": student.rows})
        scorer = MedusaScorer(heads, OfTarget(None, student.layers, fitted))
    else:
        student.head.lm_head = torch.nn.Linear(width, vocab, bias=False)
        student.head.lm_head.weight = torch.nn.Parameter(student.rows, requires_grad=False)
        scorer = EagleScorer(student.head, OfTarget(model.get_input_embeddings(), student.layers, fitted))
    scorer.begin()
    scorer.take_states(len(context) - 1, states_of(model, context[:-1], student.layers))
    return scorer.score(ForwardRequest(scorer, context, draft)).logits


@pytest.mark.smoke
@pytest.mark.parametrize(("kind", "every"), [("eagle", 1), ("eagle", 3), ("medusa", 1)])
def test_losses_are_those_of_what_the_decoder_drafts(model, kind, every):
    """Position by position, draft by draft, with a pass of the decoder's scorer for each."""
    known = made_up(19, 12)
    student = student_of(model, kind)
    student.every = every
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    (batch,) = (Batches(model, known, student, replace(QUICK, repeats=1))[i] for i in range(1))
    found = student(**batch)
    drafted = set(DRAFTED.tolist())
    losses: list[list[float]] = [[] for _ in range(DEPTH)]
    for text in known:
        with torch.no_grad():
            p = model(input_ids=torch.tensor([text.tokens])).logits[0][:, DRAFTED].softmax(-1)
        for behind in range(text.start - 1, len(text.tokens) - 2):
            rows = decoders_rows(model, student, text.tokens, behind)
            for place in range(DEPTH):
                end = behind + 2 + place
                if end >= len(text.tokens) or text.tokens[end] not in drafted:
                    break
                losses[place].append(float(-(p[end - 1] * rows[place].log_softmax(-1)).sum()))
                right = rows[place].argmax() == p[end - 1].argmax()
                if kind != "medusa" and not right and (behind + int(batch["ids"].sum())) % every:
                    break
    counts = [len(each) for each in losses]
    assert found["counted"].tolist() == counts
    assert counts[0] > 0
    expected = torch.tensor([sum(each) / max(1, len(each)) for each in losses])
    torch.testing.assert_close(found["losses"], expected, atol=1e-4, rtol=1e-4)
    weighted = sum(0.8**i * expected[i] * counts[i] / counts[0] for i in range(DEPTH))
    torch.testing.assert_close(found["loss"].detach(), weighted, atol=1e-4, rtol=1e-4)
    found["loss"].backward()
    learning = [parameter for parameter in student.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in learning)


@pytest.mark.parametrize("kind", STUDENTS)
def test_a_student_shares_no_memory_with_the_target(model, kind):
    """Training changes the student's weights, and must not change the target's."""
    there = {tensor.data_ptr() for tensor in model.state_dict().values()}
    learning = {tensor.data_ptr() for tensor in student_of(model, kind).parameters() if tensor.requires_grad}
    assert not there & learning


# -- prompts, texts and batches --------------------------------------------------------------------


def test_what_is_measured_on_is_refused(tmp_path):
    mine, measured = tmp_path / "mine.jsonl", load_prompts(["chat"])[4].turns[0]
    for turn, refused in ((measured, True), (measured + " And why?", False)):
        mine.write_text(json.dumps({"id": "mine", "category": "x", "turns": ["Hello", turn]}))
        if refused:
            assert "'mine' is also in a benchmark set" in refusal(training_prompts, [mine], kind=UsageError)
        else:
            assert len(training_prompts([mine])) == 1


def test_batches_hold_every_text_within_the_budget(model, monkeypatch):
    known = made_up(*Random(1).choices(range(6, 40), k=50), 90)
    batches = make_batches(known, 80, 7)
    assert sorted(text.prompt for batch in batches for text in batch) == list(range(51))
    for batch in batches:
        assert len(batch) == 1 or max(len(text.tokens) for text in batch) * len(batch) <= 80
    assert batches == make_batches(known, 80, 7) != make_batches(known, 80, 8)
    passes, forward = [], model.forward
    monkeypatch.setattr(model, "forward", lambda **given: passes.append(1) or forward(**given))
    monkeypatch.setattr("specbench.train.batches._KEPT_BYTES", 300_000)
    steps = Batches(model, known, student_of(model, "eagle"), replace(QUICK, batch_tokens=80))
    assert 1 < steps._chunk < len(batches)
    read = [step["ids"].sum().item() for step in map(steps.__getitem__, range(len(steps)))]
    assert len(passes) == len(batches) == len(steps) // 2
    assert all(read.count(each) % 2 == 0 for each in read)
    assert read[5] == steps[5]["ids"].sum().item()  # as after a resumption


def test_texts_are_the_targets_own_and_written_once(target, monkeypatch):
    prompts = [[5, 9, 14], [30, 2], [1] * 600, [7, 7, 8, 1]]
    written = write_texts(target, prompts, 18, 6, 0, lambda *_: None)
    assert [(text.round, text.prompt) for text in written] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    for text in written:
        if text.prompt == 2:
            assert text.written == 0  # it does not fit
            continue
        alone = autoregressive_generate(prompts[text.prompt], target, max_new_tokens=6)
        assert text.tokens == (*prompts[text.prompt], *alone.token_ids)
    with texts_file(target, prompts, 6, 0).open("ab") as file:
        file.write(b'\n{"round":1,"prompt":0,"st')  # cut short
    more = write_texts(target, prompts, 30, 6, 0, lambda *_: None)
    assert more[:4] == written
    assert {text.round for text in more} == {0, 1}
    assert "No prompt fits" in refusal(write_texts, target, prompts[2:3], 9, 6, 0, print, kind=UsageError)
    monkeypatch.setattr(texts, "_run", None)
    assert write_texts(target, prompts, 30, 6, 0, lambda *_: None) == more


# -- the whole of it -------------------------------------------------------------------------------


@pytest.fixture
def train(cli, tmp_path) -> Callable[..., Any]:
    """The command, for a target whose next token hangs on the last one, and hardly on any before."""
    model: Any = tiny_llama(0, layers=3)
    for layer in model.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.data *= 0.05
    model.save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    lines = [json.dumps({"id": each.id, "category": each.category, "turns": each.turns}) for each in PROMPTS]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines), encoding="utf-8")
    common = (
        "--target",
        f"{tmp_path / 'tiny'}:float32",
        "--prompts",
        tmp_path / "mine.jsonl",
        "-n",
        16,
    )
    return lambda *words: cli("train", *common, *words)


@pytest.mark.parametrize("kind", STUDENTS)
def test_a_head_learns_and_drafts_exactly(cli: Cli, train, tmp_path, monkeypatch, kind):
    out = tmp_path / "head"
    monkeypatch.setattr(STUDENTS[kind], "rate", 5e-3)
    small = partial(TrainingSettings, batch_tokens=96, repeats=8)
    monkeypatch.setattr(import_module("specbench.cli.train"), "TrainingSettings", small)
    told = train("--kind", kind, "--tokens", 250, "--depth", DEPTH, "--out", out)
    assert told.code == 0, told.err
    assert f"The head is in {out}." in told.out
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors", "training.json"}
    training = json.loads((out / "training.json").read_text(encoding="utf-8"))
    assert training["loss"][-1][1] < training["loss"][0][1]
    metadata = read_metadata(out)
    assert metadata is not None
    assert metadata.kind == kind
    assert metadata.tokens is not None
    assert metadata.tokens >= 250
    common = ("--target", tmp_path / "tiny", "--dtype", "float32", "the thing", "-n", 24, "--json")
    plain = cli("generate", *common, "--drafter", "none").json()
    found = cli("generate", *common, "--drafter", out, "--gamma", DEPTH).json()
    assert found["text"] == plain["text"]
    assert found["drafted"] > 0


class KilledError(BaseException):
    pass


def test_cut_off_it_ends_the_same(target, tmp_path, monkeypatch):
    settings = replace(QUICK, repeats=3)
    train_head(target, PROMPTS, settings, tmp_path / "whole")
    monkeypatch.setattr(trainer, "_SAVE_INTERVAL_S", 0.0)
    out, seen = tmp_path / "parts", []

    def killed(stage: str, done: int, total: int | None, note: str) -> None:
        seen.append((stage, done))
        if len(seen) % 7 == 0:
            raise KilledError

    done, resume = False, False
    while not done:
        try:
            train_head(target, PROMPTS, settings, out, resume=resume, update=killed)
            done = True
        except KilledError:
            resume = True
    assert ("training", 2) in seen
    for name in ("model.safetensors", "config.json", "training.json"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_ctrl_c_keeps_the_training(train, tmp_path, monkeypatch):
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    words = ("--tokens", 60, "--out", tmp_path / "head")
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "write_texts", interrupted)
        told = train(*words)
    assert told.code == 130
    assert "add --resume to go on" in told.err
    train(*words).refused(2, "has not ended")
    train(*words, "--resume", "--depth", 2).refused(2, "begun with other models, prompts or options")
    assert train(*words, "--resume").code == 0
    train(*words, "--resume").refused(2, "no unfinished training")
    train(*words).refused(2, "not an empty folder")


def test_what_cannot_be_trained_is_refused(train, target, tmp_path, monkeypatch):
    train("--out", tmp_path / "x", "--target", f"{tmp_path / 'tiny'}:int8").refused(2, "int8 target")
    train("--out", tmp_path / "x", "--prompts", tmp_path / "none.jsonl").refused(2, "no prompt set or file")
    short = replace(QUICK, answer_tokens=1, tokens=4)
    said = refusal(train_head, target, PROMPTS, short, tmp_path / "z", kind=UsageError)
    assert "too short to learn from" in said
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(trainer, "write_head", lambda *_: (_ for _ in ()).throw(full))
    said = refusal(train_head, target, PROMPTS, QUICK, tmp_path / "y", kind=RunError)
    assert said.endswith("has no space left. Free some, and add --resume.")


def test_a_head_for_other_weights_is_refused_unless_told(model, target, tmp_path):
    write_head(tmp_path, student_of(model, "eagle"), target)
    other = wrap_target(tiny_llama(1, layers=3), tiny_tokenizer(), name="other", pack=False)
    said = refusal(load_drafter, str(tmp_path), other, kind=UsageError)
    assert "trained for other weights than those of other" in said
    assert load_drafter(str(tmp_path), other, LoadOptions(any_target=True)).traits.vocabulary
