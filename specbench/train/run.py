"""A training: the target writes, a head learns, the real decoder says how well, and all of it can be cut off anywhere.

What a step learns from follows from the settings, the texts and the number of the step, and nothing else is random. So
a training that goes on from a state is the one that was never cut off.
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
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs

from specbench._version import __version__
from specbench.base.errors import RunError, UsageError
from specbench.base.files import file_errors, try_lock, write_text
from specbench.base.record import Json
from specbench.bench.encoding import encode_conversation
from specbench.decoding.metrics import acceptance_by_position, tokens_per_step
from specbench.decoding.records import Step
from specbench.generate import GenerationRun
from specbench.generate_many import GenerationRuns
from specbench.models.checkpoints import text_config
from specbench.models.drafters import require_states, wrap_head
from specbench.models.head_files import find_head
from specbench.models.heads import TrainedHead, load_head
from specbench.policies import FixedLength
from specbench.specs.models import parse_model
from specbench.train.figures import Pace, Silent, Stand, earlier
from specbench.train.hidden_states import HiddenStates
from specbench.train.learner import Learner, check_start
from specbench.train.lessons import fitting, has_plain_head
from specbench.train.prompts import held_out_prompts
from specbench.train.result import write_head, write_training_file
from specbench.train.settings import Measured, TrainingSettings, Watch
from specbench.train.start import BEGUN, STATE, check_folder, check_head
from specbench.train.state import read_state, write_state
from specbench.train.students import read_layers
from specbench.train.texts import Text, TextStore, store_for, tokens_of, write_texts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specbench.bench.prompts import Prompt
    from specbench.decoding.protocols import Drafter
    from specbench.models.target import Target


_WRITING, _WRITING_AT_MOST = 0.4, 0.5
"""Share of the time given in which the target writes (docs/training.md); the larger one where it has hardly begun."""

_EPOCHS = 4
"""How often each text is seen where the tokens decide."""

_MEASURING = 0.15
"""Share of the time left for learning that measures may take: where each takes long, there are fewer. One that takes
longer by itself is cut off."""

_SLACK = 1.5
"""A measure of the same tokens may take this many times as long as the first one before it is cut off."""

_TIMED_STEPS = 2

_TIMING = 0.05
"""Share of the time left that timing steps may take, after the first one."""

_COST_STEPS, _COST_ROUNDS = 8, 2
"""Steps decoded with and without the head, in turn, to time them."""

_NOTED_EVERY_S = 10.0


def processes(*, cpu: bool) -> Accelerator:
    """The processes of a training, as ``accelerate launch`` has started them; alone without it.

    On CUDA devices each gets its own, so this has to come before the target is loaded.
    """
    return Accelerator(cpu=cpu, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(days=1))])


class Training:
    """One head, from nothing to its files, or from where it was cut off.

    Args:
        target: What the head is for; no int8 or int4 model.
        prompts: At least 3; some are held out.
        settings: How it is trained.
        out: The folder of the result. The best head so far is always there.
        source: What the prompts are called in the result.
        resume: Go on with a training that was cut off.
        start: A head to go on from, that ``settings.start`` is of.
        model: What gradients go through for PaSS: the target in ordinary layers. ``None`` for the target's own.
        group: The processes it is trained in.
        watch: Told how far it has come.
        saved_every_s: How much work may be lost, in seconds.

    Raises:
        UsageError: What cannot be trained, a folder that is not empty, or a training that was begun otherwise.
        RunError: Another process trains there, or its state is damaged.
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
        model: PreTrainedModel | None = None,
        group: Accelerator | None = None,
        watch: Watch | None = None,
        saved_every_s: float = 60.0,
    ) -> None:
        if target.quantization is not None:
            raise UsageError(
                f"A head is not trained on an {target.dtype} target.", f"Leave out --dtype {target.dtype}."
            )
        places = vars(target.language_model.model).get("hf_device_map", {})
        if len({*places.values()}) > 1:
            raise UsageError(
                "A head is not trained on a target that lies on several devices.", "Load it onto one."
            )
        check_folder(out, resume=resume)
        settings.draft_vocab(target.vocab_size)
        if start is not None:
            check_head(start, settings, target)
        self._start = start
        self._target, self._settings, self._out, self._source = target, settings, out, source
        self._model = model or target.language_model.model
        self._group = group or processes(cpu=target.scorer.device.type == "cpu")
        self._watch, self._saved_every_s = watch or Silent(), saved_every_s
        layers = self._model.config.get_text_config(decoder=True).num_hidden_layers
        settings.head_layers(layers)
        require_states(target, (layers,))
        if settings.store_states and not has_plain_head(self._model):
            raise UsageError(
                f"The logits of {target.name} do not follow from its hidden states by a product alone.",
                "Leave --store-states out.",
            )
        if start is not None:
            check_start(start, self._model, settings)
        trained, held = held_out_prompts(prompts, settings.held_out)
        self._prompts = [encode_conversation(target, prompt) for prompt in trained]
        self._held = [(prompt, encode_conversation(target, prompt)) for prompt in held]
        self._began, self._spent_s = time.monotonic(), 0.0
        self._begun: Json = {}
        self._texts: list[Text] = []

    @property
    def _main(self) -> bool:
        return bool(self._group.is_main_process)

    @property
    def _seconds(self) -> float:
        """Of the training so far, over all starts."""
        return self._spent_s + time.monotonic() - self._began

    def _agreed(self, value: Any) -> Any:
        """What the main process says."""
        if self._group.num_processes == 1:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]

    def run(self) -> Measured:
        """Train to the end.

        Returns:
            The best measure; the head that it is of lies in the folder.

        Raises:
            UsageError: No prompt fits the target's context, or what is written teaches nothing.
            RunError: A folder cannot be written, or texts are gone.
        """
        with self._only_one():
            self._begin()
            states = self._hidden_states()
            self._texts = self._written(states)
            learner = Learner(
                self._target, self._model, self._texts, self._settings, self._group, self._start, states
            )
            best = self._learn(learner)
        if self._main:
            with suppress(OSError):
                # First, for without its checkpoint this training would begin anew, over the head that it has made.
                (self._out / STATE / BEGUN).unlink()
                shutil.rmtree(self._out / STATE)
        return best

    @contextmanager
    def _only_one(self) -> Iterator[None]:
        if not self._main:
            yield
            return
        state = self._out / STATE
        with file_errors(f"The folder {str(self._out)!r} cannot be written", "Name another one with --out."):
            state.mkdir(parents=True, exist_ok=True)
            lock = try_lock(state / "lock")
        if lock is None:
            raise RunError(
                f"Another process trains into {str(self._out)!r}.", "Wait, or name another folder."
            )
        try:
            for left in (*self._out.glob(".*.partial"), *state.glob(".*.partial")):  # by one that was killed
                with suppress(OSError):
                    left.unlink()
            yield
        finally:
            lock.release()

    # -- what was begun --------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Note what is begun, or hold it against what was."""
        digest = hashlib.sha256(json.dumps([self._prompts, [ids for _, ids in self._held]]).encode())
        asked = {
            "target": self._target.language_model.identity,
            "dtype": self._target.dtype,
            "prompts": digest.hexdigest()[:16],
            **self._settings.facts(),
        }
        path = self._out / STATE / BEGUN
        if not path.is_file():
            self._begun = {"asked": asked, "texts": None, "steps": None, "seconds": 0.0}
            if self._main:
                self._note()
            return
        with file_errors(f"The state {str(path)!r} cannot be read"):
            try:
                self._begun = json.loads(path.read_text(encoding="utf-8"))
                earlier, self._spent_s = self._begun["asked"], float(self._begun["seconds"])
            except (ValueError, KeyError, TypeError) as error:
                raise RunError(
                    f"The state {str(path)!r} is damaged.", "Train into another folder."
                ) from error
        if None not in (asked["minutes"], earlier.get("minutes")):
            earlier["minutes"] = asked["minutes"]  # more of them, or fewer, make no other training
        for name, value in asked.items():
            if earlier.get(name) != value:
                raise UsageError(
                    f"The training in {str(self._out)!r} was begun with another {name.replace('_', ' ')}.",
                    "Give what it was begun with, or name another folder with --out.",
                )

    def _note(self, **more: Any) -> None:
        self._begun |= {"seconds": self._seconds, **more}
        path = self._out / STATE / BEGUN
        with file_errors(
            f"The folder {str(self._out)!r} cannot be written", "Free some space, and add --resume."
        ):
            write_text(path, json.dumps(self._begun) + "\n")

    # -- texts -----------------------------------------------------------------------------------------

    def _hidden_states(self) -> HiddenStates | None:
        """Where the target's are stored; ``None`` for nowhere."""
        if not self._settings.store_states:
            return None
        config = text_config(self._model.config)
        layers = (*read_layers(self._settings.kind, config.num_hidden_layers), config.num_hidden_layers)
        return HiddenStates(self._out / STATE / "states", layers, config.hidden_size, self._model.dtype)

    def _written(self, states: HiddenStates | None) -> list[Text]:
        """The texts to train on; written now, unless they were before."""
        settings, rank = self._settings, self._group.process_index
        store = store_for(self._target, self._prompts, settings.answer_tokens, settings.seed, rank)
        folder = f"folder {str(self._out)!r}"
        cut = TextStore(self._out / STATE, rank, within=folder, advice="Name another one with --out.")
        if self._begun["texts"] is None:
            share = slice(rank, None, self._group.num_processes)
            store.check_space(settings.tokens or 0)
            if states is not None:
                states.check_space(settings.tokens or 0)
            write_texts(
                self._target,
                self._prompts,
                store,
                answer_tokens=settings.answer_tokens,
                seed=settings.seed,
                enough=self._enough_written(),
                share=share,
                cut=None if settings.minutes is None else cut,
                states=states,
            )
            self._group.wait_for_everyone()
            if self._main:
                texts = self._enough_of(store.read() | cut.read())
                self._note(texts=[text.key for text in texts])
            self._begun["texts"] = self._agreed(self._begun["texts"])
        known = store.read() | cut.read()
        keys = [tuple(key) for key in self._begun["texts"]]
        if any(key not in known for key in keys):
            raise RunError(
                "Texts that this training was begun with are gone from the cache folder.",
                "Train into another folder.",
            )
        texts = fitting([known[key] for key in keys], settings.batch_tokens, settings.depth)
        if not texts:
            raise UsageError(
                "What the target wrote is too short to learn from.",
                f"Name other prompts, or give more {'--tokens' if settings.minutes is None else '--minutes'}.",
            )
        return texts

    def _enough_written(self) -> Callable[[int, int], bool]:
        """Says when the target has written enough, and tells the watch."""
        settings, others = self._settings, int(self._group.num_processes)
        first: tuple[int, float] | None = None
        noted = self._seconds

        def enough(written: int, everything: int) -> bool:
            nonlocal first, noted
            now, total = self._seconds, everything * others
            first = first or (total, now)
            if self._main and now - noted > _NOTED_EVERY_S:
                noted = now
                self._note()
            if settings.minutes is not None:
                limit = (
                    60
                    * settings.minutes
                    * (_WRITING if everything >= settings.answer_tokens else _WRITING_AT_MOST)
                )
                self._watch.wrote(total, None, max(0.0, limit - now))
                return now >= limit
            wanted = settings.tokens or 0
            pace = (total - first[0]) / (now - first[1]) if now > first[1] else 0
            self._watch.wrote(total, wanted, max(0, wanted - total) / pace if pace else None)
            return written * others >= wanted

        return enough

    def _enough_of(self, known: Mapping[tuple[int, int], Text]) -> list[Text]:
        """Those of the texts that are trained on: the first ones, up to the tokens asked for."""
        chosen: list[Text] = []
        written = 0
        for text in known.values():
            if self._settings.tokens is not None and written >= self._settings.tokens:
                break
            chosen.append(text)
            written += text.written
        return chosen

    # -- learning --------------------------------------------------------------------------------------

    def _learn(self, learner: Learner) -> Measured:
        """From where it stands to the last step, or to where nothing is gained any more."""
        path, stand = self._out / STATE / "checkpoint.safetensors", Stand()
        if path.is_file():
            tensors, facts = read_state(path)
            learner.restore(tensors)
            stand = Stand.of(facts)
            self._began, self._spent_s = time.monotonic(), max(stand.seconds, self._seconds)

        def save() -> None:
            stand.seconds = self._seconds
            if self._main:
                write_state(path, learner.tensors(), asdict(stand))

        if not stand.measures_made:
            self._measure(learner, stand)
        self._plan(learner, stand)
        saved, pace = time.monotonic(), Pace(stand.step)
        while stand.step < stand.steps and not self._agreed(stand.ended):
            stand.took(learner.step(stand.step, stand.steps))
            self._watch.trained(stand.step, stand.steps, stand.loss, self._left(stand, pace))
            if stand.step == stand.measured_next or self._agreed(self._time_is_up(stand)):
                self._measure(learner, stand)
                self._plan_again(learner, stand, pace)
                save()
                saved, pace = time.monotonic(), Pace(stand.step)
            elif time.monotonic() - saved >= self._saved_every_s:
                save()
                saved = time.monotonic()
        if self._main:
            write_training_file(self._out, self._story(learner, stand))
        return max(map(Measured.of, self._agreed(stand.measures)), key=lambda each: each.tokens_per_step)

    def _time_is_up(self, stand: Stand) -> bool:
        """Whether there is time for a measure at most."""
        minutes = self._settings.minutes
        return minutes is not None and self._seconds + stand.measure_s >= 60 * minutes

    def _left(self, stand: Stand, pace: Pace) -> float:
        """Seconds to the end, as things go."""
        measures, minutes = stand.measures_left(self._measures(stand)), self._settings.minutes
        left = (stand.steps - stand.step) * pace.of(stand.step) + measures * stand.measure_s
        return left if minutes is None else max(0.0, min(left, 60 * minutes - self._seconds))

    def _measures(self, stand: Stand) -> int:
        """How often it is measured, besides untrained."""
        fitting = self._measuring_s / max(stand.first_measure_s, 1e-3)
        return int(min(self._settings.measures, max(1, fitting)))

    @property
    def _measuring_s(self) -> float:
        """Seconds that all measures together may take, the untrained head's apart, and any of them by itself."""
        minutes = self._settings.minutes
        return math.inf if minutes is None else _MEASURING * (1 - _WRITING) * 60 * minutes

    def _plan(self, learner: Learner, stand: Stand) -> None:
        """Settle how many steps there will be, for the learning rate goes by it; noted before the first is made."""
        if self._begun["steps"] is None:
            if self._settings.minutes is None:
                steps = (self._settings.epochs or _EPOCHS) * learner.epoch_steps
            else:
                timed = [learner.rehearse(0)]
                if sum(timed[0]) <= _TIMING * (60 * self._settings.minutes - self._seconds):
                    timed = [learner.rehearse(number) for number in range(_TIMED_STEPS)]
                reading_s, learning_s = (sum(each) / len(timed) for each in zip(*timed, strict=True))
                learner.plan(self._in_time(learner, stand, learning_s))
                steps = self._in_time(learner, stand, learning_s + reading_s / learner.turns)
            if self._main:
                self._note(steps=steps)
            self._begun["steps"] = steps
        first = int(self._agreed(self._begun["steps"]))
        learner.plan(first)
        if not stand.steps:
            stand.plan(first, self._measures(stand))

    def _plan_again(self, learner: Learner, stand: Stand, pace: Pace) -> None:
        """With minutes, so many steps as there is time for, at the pace of the last ones: the learning rate has to come
        to its end, however slow the machine has become."""
        steps = stand.steps
        if self._settings.minutes is not None and stand.step < steps:
            steps = self._agreed(self._in_time(learner, stand, pace.before_measure(stand)))
        stand.plan(steps, self._measures(stand))

    def _in_time(self, learner: Learner, stand: Stand, pace: float) -> int:
        """Steps in all, of so many seconds each, for which there is time besides measures."""
        settings = self._settings
        assert settings.minutes is not None
        measures = stand.measures_left(self._measures(stand))
        left = 60 * settings.minutes - self._seconds - measures * stand.measure_s
        steps = stand.step + max(1, int(left / pace))
        return steps if settings.epochs is None else min(steps, settings.epochs * learner.epoch_steps)

    def _measure(self, learner: Learner, stand: Stand) -> None:
        """Let the real decoder draft with the head as it is, for all prompts side by side; the best head is kept."""
        if self._main:
            began = time.monotonic()
            drafter = self._candidate(learner)
            by_category = self._decoded(drafter, stand)
            stand.measure_s = time.monotonic() - began
            stand.first_measure_s = stand.first_measure_s or stand.measure_s
            stand.step_cost = stand.step_cost or self._step_cost(drafter)
            every = [step for steps in by_category.values() for step in steps]
            measured = Measured(
                stand.step,
                stand.tokens,
                stand.mean_loss,
                tokens_per_step(every) or 1.0,
                tuple(rate.rate or 0.0 for rate in acceptance_by_position(every)),
                {name: tokens_per_step(steps) or 1.0 for name, steps in by_category.items()},
                round(self._seconds, 1),
                stand.step_cost,
            )
            best = stand.add(measured, self._settings.patience)
            stand.ended = stand.ended or self._time_is_up(stand)
            if best:
                self._write(learner, self._out)
                write_training_file(self._out, self._story(learner, stand))
            self._watch.measured(measured, best=best)
        stand.measures_made += 1
        self._group.wait_for_everyone()

    def _candidate(self, learner: Learner) -> Drafter:
        """The head as it is, from its files."""
        candidate = (self._out / STATE / "candidate").resolve()
        self._write(learner, candidate)
        head = find_head(parse_model(str(candidate)))
        assert head is not None
        return wrap_head(load_head(head), self._target)

    def _run(self, ids: Sequence[int], drafter: Drafter | None, tokens: int, **more: Any) -> GenerationRun:
        gamma = FixedLength(self._settings.depth + (self._settings.kind == "pass"))
        return GenerationRun(ids, self._target, drafter, policy=gamma, max_new_tokens=tokens, **more)

    def _decoded(self, drafter: Drafter, stand: Stand) -> dict[str, list[Step]]:
        """The steps of the held-out prompts, by category: as far as the first measure came in its time."""
        limits = stand.reached or [self._settings.measured_tokens] * len(self._held)
        places = [place for place, tokens in enumerate(limits) if tokens > 1]
        runs = [self._run(self._held[place][1], drafter, limits[place]) for place in places]
        ends = time.monotonic() + self._measuring_s * (_SLACK if stand.reached else 1.0)
        found: dict[str, list[Step]] = {}
        written = [0] * len(limits)
        made = GenerationRuns(runs, max_batch=len(runs))
        for i, event in made:
            if isinstance(event, Exception):
                raise event
            written[places[i]] += len(tokens_of(event))
            if isinstance(event, Step):
                found.setdefault(self._held[places[i]][0].category, []).append(event)
            if found and time.monotonic() >= ends:
                made.close()
                limits = written
                break
        stand.reached = stand.reached or limits
        return found

    def _step_cost(self, drafter: Drafter) -> float | None:
        """How many plain steps a step with the whole draft takes, of one prompt by itself: medians; or ``None``."""
        ids = min((ids for _, ids in self._held), key=len)
        times: dict[bool, list[float]] = {True: [], False: []}
        for drafts in (True, False) * _COST_ROUNDS:
            run = self._run(ids, drafter if drafts else None, 8 * _COST_STEPS, ignore_eos=True)
            steps = [record for record in islice(run, _COST_STEPS + 2) if isinstance(record, Step)]
            times[drafts] += [
                step.times.total_s for step in steps[1:]
            ]  # in the first one the head reads the prompt
        if not (times[True] and times[False]):
            return None
        return statistics.median(times[True]) / statistics.median(times[False])

    def _write(self, learner: Learner, folder: Path) -> None:
        write_head(
            folder,
            learner.student,
            self._target,
            learner.head,
            learner.drafted,
            compact=self._settings.compact,
        )

    def _story(self, learner: Learner, stand: Stand) -> Json:
        """How the head came about."""
        target, settings = self._target, self._settings
        words = "The rows of its head are the target's"
        if learner.student.started_from is not None:
            words += f", and it was started from {learner.student.started_from}"
        return {
            "specbench": __version__,
            "torch": torch.__version__,
            "kind": settings.kind,
            "target": {
                "name": target.name,
                "fingerprint": target.language_model.identity,
                "dtype": target.dtype,
            },
            "derived": f"{words}: the target's license applies to it, and asks for attribution where it does so.",
            "settings": settings.facts(),
            "start": None if self._start is None else earlier(self._start),
            "data": {
                "prompts": self._source,
                "trained_on": len({text.prompt for text in self._texts}),
                "held_out": [prompt.id for prompt, _ in self._held],
                "texts": len(self._texts),
                "tokens": sum(text.written for text in self._texts),
            },
            "steps": stand.steps,
            "seconds": round(self._seconds, 1),
            "loss": stand.curve,
            "measured": stand.measures,
        }
