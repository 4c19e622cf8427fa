"""What a sweep asks of whatever decodes, and what it gets: loaded models, a server, a test's script."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from specbench.bench.grid import SweepConfig
from specbench.bench.passes import PassTimes, SharedTimes
from specbench.bench.serving import Encoded, Workload
from specbench.decoding.records import Step
from specbench.models.training_metadata import TrainingMetadata
from specbench.options import DecodingOptions
from specbench.results.lines import Pool, ServerAnswer, Speculation
from specbench.results.run import TargetModel

if TYPE_CHECKING:
    from specbench.backends.torch.parity import Difference
    from specbench.bench.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished generation.

    Attributes:
        prompt_tokens: Length of the prompt.
        token_ids: The output; of a server as far as its tokens are known.
        finish_reason: Why it ended.
        prefill_s: Time of the target's pass over the prompt.
        ttft_s: Time to the first emission.
        decode_s: Time behind it.
        first_tokens: How many tokens the first emission held.
        steps: Empty where the decoding was not specbench's.
        peak_memory_bytes: Most memory in use meanwhile.
        log_probability: Natural logarithm of the probability that the target gives the output; ``None`` where nobody
            asked.
        reported_tokens: How many tokens the output has where ``token_ids`` may lack some: of a server.
        server: What else a server reported, where one generated it.
    """

    prompt_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: str | None
    prefill_s: float
    ttft_s: float
    decode_s: float
    first_tokens: int = 1
    steps: tuple[Step, ...] = ()
    peak_memory_bytes: int | None = None
    log_probability: float | None = None
    reported_tokens: int | None = None
    server: ServerAnswer | None = None

    @property
    def tokens(self) -> int:
        """How many tokens the output has."""
        return len(self.token_ids) if self.reported_tokens is None else self.reported_tokens


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """One of several generations side by side.

    Attributes:
        outcome: Its figures; the time to its first emission begins when it was sent.
        arrived_s: When it was sent, in seconds from the beginning of the group.
        queued_s: How long it waited for its turn.
    """

    outcome: Outcome
    arrived_s: float
    queued_s: float


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """Generations side by side.

    Attributes:
        requests: In the order in which they came.
        seconds: From the beginning to the end of the last of them.
        tokens: That were emitted in this time, for requests that are not measured too.
        pool: How much of the target's pool was taken; ``None`` without one.
        peak_memory_bytes: Most memory in use meanwhile.
        speculation: What was drafted meanwhile, for all requests, where a server counts it; else ``None``.
    """

    requests: tuple[RequestOutcome, ...]
    seconds: float
    tokens: int
    pool: Pool | None = None
    peak_memory_bytes: int | None = None
    speculation: Speculation | None = None


class BenchEngine(Protocol[Encoded]):
    """Carries out what a sweep asks for. Its models stay loaded, and nothing is left over from one call to the next."""

    def describe_target(self, decoding: DecodingOptions) -> TargetModel:
        """The field ``target`` of ``run.json``."""
        ...

    @property
    def heads(self) -> Mapping[str, TrainingMetadata]:
        """How trained heads came about, by the names of the drafters (``specbench.models.training_metadata``)."""
        ...

    def encode(self, prompt: Prompt, answers: Sequence[Sequence[int]]) -> Encoded:
        """A conversation as the engine takes it: models as token ids.

        Args:
            prompt: What the user says, turn by turn.
            answers: The outputs of the turns so far; the turn behind them is the one to answer.
        """
        ...

    def generate(
        self, config: SweepConfig, prompt: Encoded, decoding: DecodingOptions, *, seed: int
    ) -> Outcome:
        """Decode one prompt; any exception means that this generation failed."""
        ...

    def generate_group(
        self, config: SweepConfig, load: Workload[Encoded], decoding: DecodingOptions
    ) -> GroupOutcome:
        """Decode requests side by side, in the batch of the configuration; any exception means that all failed."""
        ...

    def measure_costs(self, prompt: Encoded, widths: Sequence[int], abreast: Sequence[int] = ()) -> PassTimes:
        """Time single passes: of the target with each number of tokens in ``widths``, and of the drafters, also with
        so many nodes of a tree ``abreast``.

        A sweep asks for this again and again, so that a disturbance spoils a few of the times and not their median.
        """
        ...

    def measure_shared_costs(
        self, prompt: Encoded, requests: int, widths: Sequence[int], only: Collection[str] | None = None
    ) -> SharedTimes:
        """Time passes that so many requests share: of the target with each number of tokens of each in ``widths``, and
        of the drafters, all or ``only`` some."""
        ...

    def difference(
        self, prompt: Encoded, tokens: Sequence[int], plain: Sequence[int], decoding: DecodingOptions
    ) -> Difference | None:
        """Where two greedy outputs part, and whether rounding explains it; ``None`` if they do not, or nobody knows."""
        ...
