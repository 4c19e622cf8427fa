"""Generate from many prompts in batches: the Python interface to the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from specbench.backends.torch.batch import RequestFactory
from specbench.backends.torch.pools import PAGE
from specbench.base.errors import UsageError
from specbench.decoding.clocks import clock_for
from specbench.decoding.records import Generation
from specbench.decoding.schedule import Event, Scheduler
from specbench.generate import GenerationRun, as_tokens, policy_of, resolve_drafter
from specbench.policies.batch_costs import BatchCosts

if TYPE_CHECKING:
    from specbench.decoding.clocks import Clock
    from specbench.decoding.protocols import Drafter, DraftPolicy
    from specbench.decoding.request import Request
    from specbench.decoding.sampling import Sampling
    from specbench.models.target import Target

TREE_POSITIONS = 128
"""Cache positions for a draft tree, in addition to the output's."""


class GenerationRuns:
    """A batch of generations: iterate over their records as they come, or ask for all results.

    Iterating yields the index of a generation in ``runs`` with its next record, or with the exception that ended it.
    A batch can be iterated once. Leaving the iteration ends all generations.

    Args:
        runs: Generations of one target; an exception in place of a generation that could not begin.
        max_batch: Largest batch.
        max_tokens_per_pass: Most tokens in a forward pass; longer prompts are split.
        pool_tokens: Capacity of the KV cache pool in tokens; ``None`` is enough for the whole batch. With less,
            requests wait, or are removed from the pool and prefilled again later.
        page: Positions in a page of the pool. ``None`` takes one page per request, which is faster, if the capacity is
            enough for the whole batch, otherwise pages of 16.
        later: Runs that may be added later; the pool is made large enough for them.
        clock: A function that returns the time in seconds; ``None`` for the device's clock.
        batch_costs: Costs of similar forward passes that were measured earlier.

    Attributes:
        batch_costs: Costs of forward passes, for policies that read them.
        factory: Makes the requests; ``None`` if there are none.

    Raises:
        UsageError: A limit is below 1, or there are several targets.

    Examples:
        >>> prompts = [encode_prompt(target.tokenizer, text) for text in ("Hi", "Count to 5.")]
        >>> runs = GenerationRuns([GenerationRun(prompt, target, drafter, max_new_tokens=4) for prompt in prompts])
        >>> sorted({index for index, record in runs})
        [0, 1]
    """

    def __init__(
        self,
        runs: Sequence[GenerationRun | Exception],
        *,
        max_batch: int = 8,
        max_tokens_per_pass: int = 512,
        pool_tokens: int | None = None,
        page: int | None = None,
        later: Sequence[GenerationRun] = (),
        clock: Clock | None = None,
        batch_costs: BatchCosts | None = None,
    ) -> None:
        self.runs: list[GenerationRun | Exception] = []
        self.max_batch = max_batch
        self._errors: dict[int, Exception] = {}
        begun = [run for run in (*runs, *later) if isinstance(run, GenerationRun)]
        if any(run.target.scorer is not begun[0].target.scorer for run in begun):
            raise UsageError(
                "The generations have several targets.",
                "Decode the generations of each target in a call of their own.",
            )
        if clock is None and begun:
            clock = clock_for(str(begun[0].target.scorer.device))
        self.batch_costs = BatchCosts() if batch_costs is None else batch_costs
        # What these know of this object they know without it, so that it goes as soon as nobody holds it.
        self._scheduler = Scheduler(
            max_batch=max_batch,
            max_tokens_per_pass=max_tokens_per_pass,
            clock=clock,
            watch=self.batch_costs.observe if max_batch > 1 else None,
        )
        self.factory: RequestFactory | None = None
        if begun:
            limit = begun[0].target.scorer.context_limit
            longest = max(min(run.most_tokens, limit or run.most_tokens) for run in begun) + TREE_POSITIONS
            tokens = pool_tokens or (longest * max_batch if max_batch > 1 else None)
            page = page or (longest if pool_tokens is None else PAGE)
            self.factory = RequestFactory(begun[0].target.scorer, tokens, page)
            for drafter in {id(run.drafter): run.drafter for run in begun}.values():
                self.factory.open(drafter)  # models are tried out now, and not while somebody waits
        for run in runs:
            self.add(run)
        self._events = self._iterate()

    def __len__(self) -> int:
        """Return the number of runs that have not ended."""
        return len(self._scheduler)

    def now(self) -> float:
        """Return the time of the clock, which stops while the consumer of the iteration handles a record."""
        return self._scheduler.now()

    def add(self, run: GenerationRun | Exception, arrived: float | None = None) -> int:
        """Add a generation of the same target to the end of the queue, and return its index in ``runs``.

        ``arrived`` is the time of its arrival on the clock of ``now()``, see ``Scheduler.add``; ``None`` for now.
        """
        if isinstance(run, Exception):
            self._errors[len(self.runs)] = run
        self.runs.append(run)
        return self._scheduler.add(partial(self._start, run), arrived)

    def step(self) -> list[tuple[int, Event]]:
        """Run one forward pass and return its events, for callers that add generations in between."""
        return [(i, self._record(i, event)) for i, event in self._scheduler.step()]

    def close(self) -> None:
        self._scheduler.close()
        if self.factory is not None:
            self.factory.release()

    def _start(self, run: GenerationRun | Exception) -> Request:
        if isinstance(run, Exception):
            raise run
        assert self.factory is not None
        batch_costs = None if self.max_batch == 1 else self.batch_costs
        return run.as_request(self.factory, batch_costs)

    def _iterate(self) -> Iterator[tuple[int, Event]]:
        try:
            for i, event in self._scheduler:
                yield i, self._record(i, event)
        finally:
            self.close()

    def _record(self, i: int, event: Event) -> Event:
        if isinstance(event, Exception):
            self._errors[i] = event
        else:
            cast("GenerationRun", self.runs[i]).take(event)
        return event

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        return self._events

    def cancel(self, index: int) -> None:
        self._scheduler.cancel(index)

    def result(self, index: int) -> Generation | Exception:
        """Return the output of a generation so far (``finish_reason`` is ``None`` until its end), or its exception."""
        return self._errors.get(index) or cast("GenerationRun", self.runs[index]).result()

    def results(self) -> list[Generation | Exception]:
        """Finish all generations and return their results in order."""
        for _ in self:
            pass
        found: list[Generation | Exception] = []
        for index in range(len(self.runs)):
            try:
                found.append(self.result(index))
            except Exception as error:  # say of a tokenizer that cannot decode these tokens
                found.append(error)
        return found


def speculative_generate_many(
    prompts: Iterable[str | Sequence[int] | GenerationRun],
    target: Target,
    drafter: Drafter | str | None,
    *,
    max_batch: int = 8,
    max_tokens_per_pass: int = 512,
    pool_tokens: int | None = None,
    page: int | None = None,
    gamma: int | None = None,
    policy: DraftPolicy | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
    chat: bool | None = None,
    system: str | None = None,
    **settings: Any,
) -> GenerationRuns:
    """Generate from many prompts in batches; each output equals that of the prompt decoded alone, but for rounding.

    ``.results()`` gives the generations in the order of the prompts. Iterating gives records as they come.

    Args:
        prompts: Texts, token ids, or ``GenerationRun``s of the same target with settings of their own.
        target, drafter, gamma, policy, sampling, chat, system: See ``speculative_generate``. Each request gets a fresh
            copy of the drafter and of the policy.
        max_batch, max_tokens_per_pass, pool_tokens, page: See ``GenerationRuns``.
        seed: Seed of each request.
        settings: The other arguments of ``speculative_generate``.

    Raises:
        UsageError: An argument is out of its range. For an invalid prompt, the result is the exception.

    Examples:
        >>> prompts = ["Hi", "Count from 1 to 5."]
        >>> runs = speculative_generate_many(prompts, target, drafter, max_new_tokens=2)
        >>> [len(result.token_ids) for result in runs.results()]
        [2, 2]
    """
    policy = policy or policy_of(gamma)
    drafter = resolve_drafter(drafter, target)

    def run(prompt: Sequence[int]) -> GenerationRun:
        return GenerationRun(prompt, target, drafter, policy=policy, sampling=sampling, seed=seed, **settings)

    def begun(prompt: str | Sequence[int] | GenerationRun) -> GenerationRun | Exception:
        if isinstance(prompt, GenerationRun):
            return prompt
        try:
            return run(as_tokens(prompt, target, chat=chat, system=system))
        except UsageError as error:
            return error

    run(())  # what is wrong with the settings is wrong for all
    return GenerationRuns(
        [begun(prompt) for prompt in prompts],
        max_batch=max_batch,
        max_tokens_per_pass=max_tokens_per_pass,
        pool_tokens=pool_tokens,
        page=page,
    )
