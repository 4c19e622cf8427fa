"""The draft-length rule that a command line asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LengthRule"]


class LengthRule:
    """The draft-length rule that is asked for; building it checks its options.

    Nothing asked for is ``auto``. It goes by clocks, which changes no output in greedy decoding; a sampled one is to be
    the same whenever its seed is, so there it is ``fixed``, and where a γ is given.
    """

    def __init__(
        self,
        length_policy: str | None,
        egag: bool,
        costs: Path | None,
        options: dict[str, Any],
        *,
        greedy: bool,
    ) -> None:
        from specbench.errors import UsageError
        from specbench.lengths import build_policy, check_costs, load_costs, policy_word

        if egag and length_policy is not None:
            raise UsageError("--egag and --length-policy are both given.", "Give one of them.")
        default = "auto" if greedy and options.get("gamma") is None else "fixed"
        self.spec = "egag" if egag else length_policy or default
        self._options, self._costs = options, None
        build_policy(self.spec, **options)
        if costs is not None:
            policy_word(self.spec).require("costs")
            self._costs = load_costs(costs)
            check_costs(self._costs)

    def build(self, drafter: str) -> Any:
        """The rule for a drafter by its name."""
        from specbench.lengths import build_policy, parse_costs

        costs = None if self._costs is None else parse_costs(self._costs, drafter)
        return build_policy(self.spec, **self._options, costs=costs)
