"""The interface between a sweep and the engine that decodes for it: loaded models or servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from specbench.base.errors import RunError
from specbench.bench.serving import Workload
from specbench.models.training_metadata import TrainingMetadata
from specbench.options import DecodingOptions
from specbench.results.lines import CostLine, Generation, Group
from specbench.results.run import TargetModel
from specbench.rows import Row

if TYPE_CHECKING:
    from specbench.backends.torch.parity import Difference
    from specbench.bench.prompts import Prompt


class BenchEngine(Protocol):
    """Interface of an engine that decodes for a sweep. Its models stay loaded, and calls do not affect later calls.

    Attributes:
        heads: The training metadata of trained heads, by the names of their drafters.
    """

    heads: Mapping[str, TrainingMetadata] = {}

    def describe_target(self, decoding: DecodingOptions) -> TargetModel:
        """Return the field ``target`` of ``run.json``."""
        ...

    def encode(self, prompt: Prompt, answers: Sequence[Any]) -> Any:
        """Return a conversation in the engine's form, up to the turn after the given answers: ids, or texts."""
        ...

    def count_tokens(self, prompt: Prompt) -> int:
        """Return how many tokens the first turn of a prompt has, with everything that a chat template adds.

        Raises:
            UsageError: There is no tokenizer.
        """
        raise RunError("This engine cannot count the tokens of prompts.")

    def generate(self, config: Row, prompt: Any, decoding: DecodingOptions, *, seed: int) -> Generation:
        """Decode one prompt; any exception means that this generation failed."""
        ...

    def generate_group(self, config: Row, workload: Workload, decoding: DecodingOptions) -> Group:
        """Decode requests together, in the batch of the configuration; any exception means that all failed."""
        ...

    def measure_costs(
        self,
        prompt: Any,
        widths: Sequence[int],
        context: int | None = None,
    ) -> list[CostLine]:
        """Time forward passes of the target with each number of tokens, and of the drafters.

        ``context`` is the number of tokens before them; ``None`` for the usual one. A sweep repeats this call, so that
        a disturbance affects a few of the times but not their median.

        Raises:
            RunError: The forward passes cannot be timed.
        """
        raise RunError("Forward passes of this engine cannot be timed.")

    def difference(
        self, prompt: Any, tokens: Sequence[int], plain: Sequence[int], decoding: DecodingOptions
    ) -> Difference | None:
        """Return where two greedy outputs first differ, and whether rounding explains this; ``None`` if unknown."""
        return None
