"""The draft-length rule that a command line asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LengthRule"]


class LengthRule:
    """The draft-length rule that is asked for; building it checks its options."""

    def __init__(
        self, length_policy: str | None, egag: bool, costs: Path | None, options: dict[str, Any]
    ) -> None:
        from specbench.errors import UsageError
        from specbench.lengths import build_policy, check_costs, load_costs, policy_word

        if egag and length_policy is not None:
            raise UsageError("--egag and --length-policy are both given.", "Give one of them.")
        self.spec = "egag" if egag else length_policy or "fixed"
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
