"""Run a training: the target writes texts, a head is trained on them, and real decoding measures it.

A step depends only on the settings, the texts and its number. So a training that is interrupted and resumed gives the
same result as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from specbench._version import __version__
from specbench.base.errors import RunError, UsageError
from specbench.base.files import file_errors, try_lock, write_text
from specbench.base.record import Json, to_dict
from specbench.bench.encoding import encode_conversation
from specbench.decoding.metrics import acceptance_by_position, tokens_per_step
from specbench.decoding.records import Step
from specbench.generate import GenerationRun
from specbench.generate_many import GenerationRuns
from specbench.models.checkpoints import text_config
from specbench.models.drafters import require_states, wrap_head
from specbench.models.heads import TrainedHead, find_head, load_head
from specbench.models.training_metadata import TRAINING_FILE
from specbench.policies import FixedLength
from specbench.specs.models import parse_model
from specbench.train.learner import Learner, check_start
from specbench.train.lessons import trainable_texts
from specbench.train.prompts import held_out_prompts
from specbench.train.result import write_head, write_training_file
from specbench.train.settings import Measured, TrainingSettings
from specbench.train.state import BEGUN, STATE, TrainerState, check_folder, read_state, write_state
from specbench.train.texts import Text, TextStore, store_for, write_texts

if TYPE_CHECKING:
    from specbench.bench.prompts import Prompt
    from specbench.decoding.protocols import Drafter
    from specbench.models.target import Target


_WRITING_STAGE = "the target writes"

_WRITING = 0.4
"""Share of the given time in which the target writes."""

_MEASURING = 0.15
"""Share of the training time for measurements: there are fewer if they take long, and a longer one is cut off."""

_SLACK = 1.5
"""Largest duration of a repeated measurement, as a multiple of the first one's limit."""

_COST_STEPS, _COST_ROUNDS = 8, 2
"""Steps that are timed with and without the head, in turn."""

_SAVE_INTERVAL_S = 10.0


class Training:
    """The training of one head, from its beginning or from where it was interrupted.

    Args:
        target: The target, which must not be int8 or int4.
        prompts: At least 3 prompts, some of which are held out.
        out: The folder of the result, which always contains the best head so far.
        source: Name of the prompts in the training metadata.
        start: The head of ``settings.start`` to continue from.
        update: Receives the progress, as ``specbench.cli.progress.StageProgress.update`` does.
        report: Receives each measurement, and whether it is the best so far.
        save_interval_s: Seconds between checkpoints, the most work that an interruption loses.

    Raises:
        UsageError: The target or head cannot be trained, the folder is not empty, or the training was begun
            differently.
        RunError: Another process uses the folder, or its state is damaged.
    """

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Prompt],
        settings: TrainingSettings,
        out: Path,
        *,
        source: str = "",
        resume: bool = False,
        start: TrainedHead | None = None,
        update: Callable[[str, int, int | None, str, float | None], object] = lambda *_: None,
        report: Callable[[Measured, bool], object] = lambda *_: None,
        save_interval_s: float = 60.0,
    ) -> None:
        if target.quantization is not None:
            raise UsageError(
                f"Heads cannot be trained for an {target.dtype} target.", f"Leave out --dtype {target.dtype}."
            )
        devices = vars(target.language_model.model).get("hf_device_map", {})
        if len({*devices.values()}) > 1:
            raise UsageError(
                "Heads cannot be trained for a target on several devices.", "Load it onto one device."
            )
        check_folder(out, resume=resume)
        settings.draft_vocab(target.vocab_size)
        self._target, self._settings, self._out, self._source = target, settings, out, source
        self._start, self._model = start, target.language_model.model
        self._update, self._report, self._save_interval_s = update, report, save_interval_s
        layers = text_config(self._model.config).num_hidden_layers
        settings.head_layers(layers)
        require_states(target, (layers,))
        if start is not None:
            check_start(start, target, settings)
        trained, held_out = held_out_prompts(prompts, settings.held_out)
        self._prompts = [encode_conversation(target, prompt) for prompt in trained]
        self._held_out = [(prompt, encode_conversation(target, prompt)) for prompt in held_out]
        self._began, self._earlier_s = time.monotonic(), 0.0
        self._begun: Json = {}
        self._texts: list[Text] = []

    @property
    def _seconds(self) -> float:
        """Duration of the training so far, over all starts."""
        return self._earlier_s + time.monotonic() - self._began

    def run(self) -> Measured:
        """Train to the end.

        Returns:
            The best measurement; the folder contains the head that it belongs to.

        Raises:
            UsageError: No prompt fits the target's context, or the texts are too short.
            RunError: A folder cannot be written, or texts are missing.
        """
        with self._lock():
            self._begin()
            self._texts = self._write_texts()
            best = self._train(Learner(self._target, self._texts, self._settings, self._start))
        with suppress(OSError):
            # First: without its checkpoint, this training would begin anew and overwrite its head.
            (self._out / STATE / BEGUN).unlink()
            shutil.rmtree(self._out / STATE)
        return best

    @contextmanager
    def _lock(self) -> Iterator[None]:
        state = self._out / STATE
        with file_errors(f"The folder {str(self._out)!r} cannot be written", "Choose another --out."):
            state.mkdir(parents=True, exist_ok=True)
            lock = try_lock(state / "lock")
        if lock is None:
            raise RunError(
                f"Another process trains into {str(self._out)!r}.", "Wait, or choose another --out."
            )
        try:
            for partial in (*self._out.glob(".*.partial"), *state.glob(".*.partial")):  # of a killed process
                with suppress(OSError):
                    partial.unlink()
            yield
        finally:
            lock.release()

    # -- begin or resume -------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Store the settings of the training; for a resumed one, compare them with the stored ones."""
        digest = hashlib.sha256(json.dumps([self._prompts, [ids for _, ids in self._held_out]]).encode())
        begun = {
            "target": self._target.language_model.identity,
            "dtype": self._target.dtype,
            "prompts": digest.hexdigest()[:16],
            **asdict(self._settings),
        }
        path = self._out / STATE / BEGUN
        if not path.is_file():
            self._begun = {"settings": begun, "texts": None, "steps": None, "seconds": 0.0}
            self._store_begun()
            return
        with file_errors(f"The state {str(path)!r} cannot be read"):
            try:
                self._begun = json.loads(path.read_text(encoding="utf-8"))
                earlier, self._earlier_s = self._begun["settings"], float(self._begun["seconds"])
            except (ValueError, KeyError, TypeError) as error:
                raise RunError(
                    f"The state {str(path)!r} is damaged.", "Train into another folder."
                ) from error
        if None not in (begun["minutes"], earlier.get("minutes")):
            earlier["minutes"] = begun["minutes"]  # may change
        for name, value in begun.items():
            if earlier.get(name) != value:
                raise UsageError(
                    f"The training in {str(self._out)!r} was begun with another {name.replace('_', ' ')}.",
                    "Give the same, or choose another --out.",
                )

    def _store_begun(self, **more: Any) -> None:
        self._begun |= {"seconds": self._seconds, **more}
        with file_errors(
            f"The folder {str(self._out)!r} cannot be written", "Free some space, and add --resume."
        ):
            write_text(self._out / STATE / BEGUN, json.dumps(self._begun) + "\n")

    # -- texts -----------------------------------------------------------------------------------------

    def _write_texts(self) -> list[Text]:
        """Return the texts to train on; texts that are not stored yet are written now."""
        settings = self._settings
        store = store_for(self._target, self._prompts, settings.answer_tokens, settings.seed)
        folder = f"folder {str(self._out)!r}"
        cut = TextStore(self._out / STATE, within=folder, advice="Choose another --out.")
        if self._begun["texts"] is None:
            write_texts(
                self._target,
                self._prompts,
                store,
                answer_tokens=settings.answer_tokens,
                seed=settings.seed,
                enough=self._enough_written(),
                cut=None if settings.minutes is None else cut,
            )
            texts = self._first_texts(store.read() | cut.read())
            self._store_begun(texts=[text.key for text in texts])
        known = store.read() | cut.read()
        keys = [tuple(key) for key in self._begun["texts"]]
        if any(key not in known for key in keys):
            raise RunError(
                "Texts of this training are missing in the cache folder.", "Train into another folder."
            )
        texts = trainable_texts([known[key] for key in keys], settings.batch_tokens, settings.depth)
        if not texts:
            raise UsageError(
                "The target's texts are too short to learn from.",
                f"Choose other prompts, or more {'--tokens' if settings.minutes is None else '--minutes'}.",
            )
        return texts

    def _enough_written(self) -> Callable[[int, int], bool]:
        """Return a function that reports the progress of writing, and returns whether there is enough text."""
        settings = self._settings
        first: tuple[int, float] | None = None
        saved = self._seconds

        def enough(written: int, everything: int) -> bool:
            nonlocal first, saved
            now = self._seconds
            first = first or (everything, now)
            if now - saved > _SAVE_INTERVAL_S:
                saved = now
                self._store_begun()
            if settings.minutes is not None:
                limit = 60 * settings.minutes * _WRITING
                self._update(
                    _WRITING_STAGE, everything, None, f"{everything:,} tokens", max(0.0, limit - now)
                )
                return now >= limit
            wanted = settings.tokens or 0
            pace = (everything - first[0]) / (now - first[1]) if now > first[1] else 0
            left_s = max(0, wanted - everything) / pace if pace else None
            note = f"{everything:,} of {wanted:,} tokens"
            self._update(_WRITING_STAGE, everything, wanted, note, left_s)
            return written >= wanted

        return enough

    def _first_texts(self, known: Mapping[tuple[int, int], Text]) -> list[Text]:
        """Return the first texts, up to the number of tokens of the settings."""
        chosen: list[Text] = []
        written = 0
        for text in known.values():
            if self._settings.tokens is not None and written >= self._settings.tokens:
                break
            chosen.append(text)
            written += text.written
        return chosen

    # -- training --------------------------------------------------------------------------------------

    def _train(self, learner: Learner) -> Measured:
        """Train to the last step, or until measurements no longer improve."""
        path, state = self._out / STATE / "checkpoint.safetensors", TrainerState()
        if path.is_file():
            tensors, fields = read_state(path)
            learner.restore(tensors)
            state = msgspec.convert(fields, TrainerState)
            self._began, self._earlier_s = time.monotonic(), max(state.seconds, self._seconds)

        def save() -> None:
            state.seconds = self._seconds
            write_state(path, learner.tensors(), to_dict(state))

        if not state.measurements:
            self._measure(learner, state)
        self._plan(learner, state)
        saved = began = time.monotonic()
        first = state.step
        while state.step < state.steps and not state.ended:
            state.record_step(*learner.step(state.step, state.steps))
            step_s = (time.monotonic() - began) / (state.step - first)
            left_s = self._seconds_left(state, step_s)
            note = f"step {state.step:,} of {state.steps:,}, loss {state.loss or 0.0:.2f}"
            self._update("training", state.step, state.steps, note, left_s)
            if state.step == state.next_measurement or self._time_is_up(state):
                self._measure(learner, state)
                self._plan_again(state, step_s)
                save()
                saved, began, first = time.monotonic(), time.monotonic(), state.step
            elif time.monotonic() - saved >= self._save_interval_s:
                save()
                saved = time.monotonic()
        write_training_file(self._out, self._metadata(learner, state))
        return max(state.measurements, key=lambda each: each.tokens_per_step)

    def _time_is_up(self, state: TrainerState) -> bool:
        """Return whether the time left is at most enough for a measurement."""
        minutes = self._settings.minutes
        return minutes is not None and self._seconds + state.measure_s >= 60 * minutes

    def _seconds_left(self, state: TrainerState, step_s: float) -> float:
        """Estimate the remaining seconds, with steps of ``step_s``."""
        measurements, minutes = state.measurements_left(self._measures(state)), self._settings.minutes
        left = (state.steps - state.step) * step_s + measurements * state.measure_s
        return left if minutes is None else max(0.0, min(left, 60 * minutes - self._seconds))

    def _measures(self, state: TrainerState) -> int:
        """Return the number of measurements without that of the untrained head."""
        fitting = self._measuring_s / max(state.first_measure_s, 1e-3)
        return int(min(self._settings.measures, max(1, fitting)))

    @property
    def _measuring_s(self) -> float:
        """Seconds for all measurements together, without that of the untrained head, and the limit for each."""
        minutes = self._settings.minutes
        return math.inf if minutes is None else _MEASURING * (1 - _WRITING) * 60 * minutes

    def _plan(self, learner: Learner, state: TrainerState) -> None:
        """Decide the number of steps, which the learning rate depends on; it is stored before the first step."""
        if self._begun["steps"] is None:
            if self._settings.minutes is None:
                steps = self._settings.epochs * learner.epoch_steps
            else:
                reading_s, learning_s = learner.time_step()
                learner.plan(self._steps_in_time(state, learning_s))
                steps = self._steps_in_time(state, learning_s + reading_s / learner.turns)
            self._store_begun(steps=steps)
        first = int(self._begun["steps"])
        learner.plan(first)
        if not state.steps:
            state.plan(first, self._measures(state))

    def _plan_again(self, state: TrainerState, step_s: float) -> None:
        """Adapt the number of steps to the latest seconds per step, if the time in minutes is given.

        The learning rate then reaches its end even if the machine becomes slower.
        """
        steps = state.steps
        if self._settings.minutes is not None and state.step < steps:
            steps = self._steps_in_time(state, step_s)
        state.plan(steps, self._measures(state))

    def _steps_in_time(self, state: TrainerState, step_s: float) -> int:
        """Return the total number of steps of ``step_s`` seconds that the time is enough for."""
        settings = self._settings
        assert settings.minutes is not None
        measurements = state.measurements_left(self._measures(state))
        left = 60 * settings.minutes - self._seconds - measurements * state.measure_s
        return state.step + max(1, int(left / step_s))

    # -- measurements ----------------------------------------------------------------------------------

    def _measure(self, learner: Learner, state: TrainerState) -> None:
        """Decode the held-out prompts in a batch with the current head, and keep the head if it is the best."""
        began = time.monotonic()
        drafter = self._load_candidate(learner)
        by_category = self._decode_held_out(drafter, state)
        state.measure_s = time.monotonic() - began
        state.first_measure_s = state.first_measure_s or state.measure_s
        state.step_cost = state.step_cost or self._step_cost(drafter)
        every = [step for steps in by_category.values() for step in steps]
        measured = Measured(
            step=state.step,
            tokens=state.tokens,
            loss=state.loss,
            tokens_per_step=tokens_per_step(every) or 1.0,
            accepted=[rate or 0.0 for rate in acceptance_by_position(every)],
            categories={name: tokens_per_step(steps) or 1.0 for name, steps in by_category.items()},
            seconds=round(self._seconds, 1),
            step_cost=state.step_cost,
        )
        best = state.record_measurement(measured, self._settings.patience)
        state.ended = state.ended or self._time_is_up(state)
        if best:
            self._write_head(learner, self._out)
            write_training_file(self._out, self._metadata(learner, state))
        self._report(measured, best)

    def _load_candidate(self, learner: Learner) -> Drafter:
        """Write the current head, and load it from its files."""
        candidate = (self._out / STATE / "candidate").resolve()
        self._write_head(learner, candidate)
        head = find_head(parse_model(str(candidate)))
        assert head is not None
        return wrap_head(load_head(head), self._target)

    def _run(self, ids: Sequence[int], drafter: Drafter | None, tokens: int, **more: Any) -> GenerationRun:
        policy = FixedLength(self._settings.depth)
        return GenerationRun(ids, self._target, drafter, policy=policy, max_new_tokens=tokens, **more)

    def _decode_held_out(self, drafter: Drafter, state: TrainerState) -> dict[str, list[Step]]:
        """Return the steps of the held-out prompts by category, for as many tokens as the first measurement decoded."""
        limits = state.measured_tokens or [self._settings.measured_tokens] * len(self._held_out)
        places = [place for place, tokens in enumerate(limits) if tokens > 1]
        runs = [self._run(self._held_out[place][1], drafter, limits[place]) for place in places]
        ends = time.monotonic() + self._measuring_s * (_SLACK if state.measured_tokens else 1.0)
        found: dict[str, list[Step]] = {}
        written = [0] * len(limits)
        events = GenerationRuns(runs, max_batch=len(runs))
        for i, event in events:
            if isinstance(event, Exception):
                raise event
            written[places[i]] += len(event.tokens)
            if isinstance(event, Step):
                found.setdefault(self._held_out[places[i]][0].category, []).append(event)
            if found and time.monotonic() >= ends:
                events.close()
                limits = written
                break
        state.measured_tokens = state.measured_tokens or limits
        return found

    def _step_cost(self, drafter: Drafter) -> float | None:
        """Return the median time of a step with a full draft over that of a plain step, for one prompt."""
        ids = min((ids for _, ids in self._held_out), key=len)
        times: dict[bool, list[float]] = {True: [], False: []}
        for drafts in (True, False) * _COST_ROUNDS:
            run = self._run(ids, drafter if drafts else None, 8 * _COST_STEPS, ignore_eos=True)
            steps = [record for record in islice(run, _COST_STEPS + 2) if isinstance(record, Step)]
            times[drafts] += [
                step.times.total_s for step in steps[1:]
            ]  # the head's prefill is in the first one
        if not (times[True] and times[False]):
            return None
        return statistics.median(times[True]) / statistics.median(times[False])

    # -- results ---------------------------------------------------------------------------------------

    def _write_head(self, learner: Learner, folder: Path) -> None:
        student, head, vocab = learner.student, learner.head, learner.draft_vocab
        write_head(folder, student, self._target, head, vocab)

    def _metadata(self, learner: Learner, state: TrainerState) -> Json:
        """Return the training metadata."""
        target, settings, start = self._target, self._settings, self._start
        derived = "The rows of its head are the target's"
        if learner.student.started_from is not None:
            derived += f", and it was started from {learner.student.started_from}"
        return {
            "specbench": __version__,
            "torch": torch.__version__,
            "kind": settings.kind,
            "target": {
                "name": target.name,
                "fingerprint": target.language_model.identity,
                "dtype": target.dtype,
            },
            "derived": f"{derived}: the target's license applies to it, with attribution where it requires that.",
            "settings": asdict(settings),
            "start": None if start is None else _start_metadata(start),
            "data": {
                "prompts": self._source,
                "trained_on": len({text.prompt for text in self._texts}),
                "held_out": [prompt.id for prompt, _ in self._held_out],
                "texts": len(self._texts),
                "tokens": sum(text.written for text in self._texts),
            },
            "steps": state.steps,
            "seconds": round(self._seconds, 1),
            "loss": state.curve,
            "measured": [to_dict(each) for each in state.measurements],
        }


def _start_metadata(start: TrainedHead) -> Json:
    """Return the known facts about a head to continue from, with its training metadata if specbench trained it."""
    path = start.files.folder / TRAINING_FILE
    with file_errors(f"The file {str(path)!r} cannot be read"):
        training = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return {"name": start.name, "fingerprint": start.fingerprint, "training": training}
