"""``auto``: drafts another token as long as it is likely to pay for its time (docs/draft-policies.md)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from specbench.base.record import Json
from specbench.decoding.protocols import UNKNOWN_DRAFTER, DrafterPrior
from specbench.decoding.theory import best_length, expected_tokens_by_position
from specbench.policies.acceptance import OnlineLogistic, log_odds
from specbench.policies.base import ChainPolicy, confidence, is_free
from specbench.policies.costs import READING_NOTE, CostSource, MeasuredCosts
from specbench.specs.policies import LONGEST_DRAFT

if TYPE_CHECKING:
    from specbench.decoding.drafts import Draft
    from specbench.decoding.records import Step

TIMINGS = 2
"""Steps that must have timed the drafter before it may count as too slow; the first may be disturbed."""

_SURE = 6
"""Such steps, ever further apart, if a drafter ``_DISTURBED`` times as fast would pay."""

_DISTURBED = 2.0

_PROBING = 0.015
"""The share of the time of plain steps that testing whether drafting pays again may take."""

_NEIGHBOR_EVERY = 10
"""If nearly all drafts have one length, a neighboring length is tried every this many steps until it is timed."""

_NEARLY_ALL = 0.8

_MEMORY = 0.98
"""The weight of a step in the rate over that of the next one."""

_NEW = 0.1
"""The weight of a step's last tested token in the mean of such tokens."""

_LEAST_SHARE = 0.97
"""The share of the rate that a draft has to earn: drafts also teach, and rates from medians are a little high."""

_PRIOR_STEPS = 3.0
"""The weight of the prior rate, in steps."""

_USUAL = 2.0
"""The log-odds that drafters give their tokens in the mean."""

_USUAL_ODDS = 2.0
"""The log-odds with which a drafter's first tokens are accepted, if nothing is known of it."""

_UNKNOWN, _KNOWN = 1.0, 0.6
"""The standard deviations of these over prompts, of any drafter and of one whose mean acceptance is known."""

_SLOPE = 0.3
"""What the log-odds of the next token's acceptance gain, in the prior, by one of the token before it."""

_FREE = (0.0,) * (LONGEST_DRAFT + 1)
"""The times of drafts without passes."""


class AutoLength(ChainPolicy):
    """Drafts the next token iff the output tokens expected from it are worth more than its time.

    Let R be the tokens per second that this policy reaches, P the chance that all k draft tokens so far are accepted, a
    the chance that the next one is accepted if they are, D(k) the time of a draft of k passes, and v(n) the time of the
    rest of a step in which n tokens are verified. Another token is drafted iff for some j ≥ 1

        P·(a + a² + ... + a^j)  >  R·(D(k+j) - D(k) + v(k+1+j) - v(k+1))

    This maximizes R (Dinkelbach 1967): at the optimum, a longer draft earns exactly R per second. P and a are learned
    from the drafter's confidence and what was accepted, D and v from recorded times, unless costs are given. If a first
    token does not pay, nothing is drafted, except while too little is known, and for tests now and then at a bounded
    loss. A drafter without a model needs no tests: it is asked in every step, and its token is compared even if it was
    not drafted. In a cascade a token without a forward pass is weighed against the model's pass in the same way.

    Args:
        gamma_max: The most tokens drafted in a step.
        costs: Costs to go by; ``None`` measures them.

    Attributes:
        cost_source: The costs; others may take their place between prompts.
    """

    def __init__(self, gamma_max: int = 16, costs: CostSource | None = None) -> None:
        super().__init__("auto", gamma_max)
        self.cost_source = costs or MeasuredCosts()
        # Acceptance by a draft token's own log-odds, and by those of the token before it.
        # The priors lie between those of two pairs of models, and of lookup and ngram; a drafter may have its own.
        self._drafted = OnlineLogistic((1.0, 1.0), (1.0, 0.3))
        self._matched = OnlineLogistic((-1.6, 1.6), (1.0, 0.4))  # for tokens without logits
        self._upcoming = OnlineLogistic((_USUAL_ODDS - _SLOPE * _USUAL, _SLOPE), (_UNKNOWN, 0.2))
        self.reset()

    def reset(self) -> None:
        self.cost_source.reset()
        self._drafted.reset()
        self._matched.reset()
        self._upcoming.reset()
        self._tokens = 0.0
        self._passes: defaultdict[int, float] = defaultdict(float)  # of steps: the drafter's passes
        self._widths: defaultdict[int, float] = defaultdict(float)  # and tokens verified
        # Tokens that the drafter's model drew in chains, and its passes for them.
        self._drawn = self._made = _PRIOR_STEPS
        self._last = self._usual = _USUAL  # log-odds of the last tested token, and of such tokens in the mean
        self._credit = 0.0
        self._idle = 0  # steps since the last draft
        self._asked = True
        self._limit = 0
        self._copies = False
        self._unread, self._prior, self._prefill_s, self._reading_s = 0, UNKNOWN_DRAFTER, 0.0, 0.0
        self._step = 0
        self._start_step()
        self._weigh()

    def start(self, context: int, unread: int = 0, prior: DrafterPrior = UNKNOWN_DRAFTER) -> None:
        self._last = self._usual
        self._unread, self._prior, self._prefill_s = unread, prior, 0.0
        odds, spread = _USUAL_ODDS, _UNKNOWN
        if prior.acceptance is not None:
            odds, spread = log_odds(prior.acceptance), _KNOWN
        self._upcoming.expect((odds - _SLOPE * _USUAL, _SLOPE), (spread, 0.2))
        self.cost_source.start(context)
        self._weigh()

    def time_prefill(self, seconds_per_token: float) -> None:
        self._prefill_s = seconds_per_token * self._unread
        self._weigh()

    def _start_step(self) -> None:
        self._draft: Draft | None = None
        self._log_odds: list[float] = []
        self._survival = 1.0
        self._probing = False
        self._paused = False
        self._exactly: int | None = None

    # -- deciding ----------------------------------------------------------------------------------

    def begin(self, budget: int) -> int:
        self._start_step()
        self._limit = int(min(super().begin(budget), self.cost_source.reach))
        if (
            (self.cost_source.timings > 0 or self._reading_s > 0)
            and self._limit > 0
            and not self._copies
            and not self._pays(self._upcoming.chance(self._last), budget)
        ):
            self._idle += 1
            if self._reading_s > 0:  # a test would read the whole prompt
                self._probing = self._credit >= self._test_s
            else:
                self._probing = (
                    self.cost_source.timings < TIMINGS
                    or self.cost_source.may_test(self._credit >= self._probe_s or self._unsure(budget))
                    or self._pays(self._upcoming.upper_chance(self._last), budget)
                )
            self._paused = not self._probing  # except for tokens without a forward pass
        elif (tried := self._untimed_length()) is not None:
            self._exactly = self._limit = tried
        self._asked = self._limit > 0 and not self._paused
        if not self._paused:
            self._idle = 0
        return self._limit

    @property
    def _test_s(self) -> float:
        """What a test costs, with the reading of a prompt that the drafter has not read."""
        return self._probe_s + self._reading_s

    def _pays(self, chance: float, budget: int, faster: float = 1.0) -> bool:
        """Return whether the next draft token earns its time, if the drafter is ``faster`` than measured.

        If the drafter must catch up first, the rest of the output must earn that time too. It may end at any token, so
        half of what it may still have is expected. And as all of that time is paid now, the gain must also hold at the
        lower chance of acceptance. If it must read the prompt, the gain is that over plain decoding.
        """
        draft_s = [seconds / faster for seconds in self._after(0)]
        if self._promise(0, chance, chance, draft_s) <= 0.0:
            return False
        catching_up_s = self.cost_source.catching_up_s
        if not max(catching_up_s, self._reading_s):
            return True
        feared = self._upcoming.lower_chance(self._last)
        if self._reading_s > catching_up_s:
            v, tokens = self._verify_s, expected_tokens_by_position([feared] * self._limit)
            token_s = min((draft_s[k] + v[k + 1]) / tokens[k] for k in range(1, self._limit + 1))
            return (v[1] - token_s) * (budget / 2) >= self._reading_s
        gain = self._promise(0, feared, feared, draft_s)
        return gain > 0.0 and gain * (budget / 2) / (1.0 + gain) >= self._rate * catching_up_s

    def _unsure(self, budget: int) -> bool:
        """Return whether the few timings of the drafter may all have been disturbed, and another is due."""
        timings = self.cost_source.timings
        if timings >= _SURE or self._idle < 2 ** (timings - 2):
            return False
        return self._pays(self._upcoming.chance(self._last), budget, _DISTURBED)

    def _untimed_length(self) -> int | None:
        """Return a draft length to try, as another one may be faster."""
        if self._step % _NEIGHBOR_EVERY or not self._widths:
            return None
        width = max(self._widths, key=self._widths.__getitem__)
        if self._widths[width] < _NEARLY_ALL * sum(self._widths.values()):
            return None
        beside = (width + 1, width - 1) if width > 1 else ()
        return next((n - 1 for n in beside if n <= self._limit + 1 and self.cost_source.samples(n) < 3), None)

    def should_continue(self, draft: Draft) -> bool:
        self._draft = draft
        k = len(draft.tokens)
        ahead = draft.match_confidence is not None and k < len(draft.match_confidence)
        if ahead and draft.passes is None:
            # A drafter without a model costs nothing to ask, and teaches by tokens that are not drafted too.
            self._copies, self._asked, self._paused, self._probing = True, True, False, False
        self._read(draft, k)
        free = is_free(draft, k)
        if ahead:
            assert draft.match_confidence is not None
            chance = self._curve(draft, k).chance(log_odds(draft.match_confidence[k]))
        elif k == 0:
            return not self._paused
        else:
            chance = self._upcoming.chance(self._log_odds[-1])
        if free:
            return self._promise(k, chance, chance, _FREE) > 0.0
        passes = k if draft.passes is None else draft.passes
        if self._copies:
            times: Sequence[float] = self._after(passes) if self.cost_source.timings else _FREE
            return self._exactly is not None or self._promise(k, chance, chance, times) > 0.0
        if self._probing:
            return passes == 0
        forced = self._exactly is not None or self.cost_source.timings == 0
        times = self._after(passes, draft.next_is_read)
        return not self._paused and (forced or self._promise(k, chance, chance, times) > 0.0)

    def prefers_model(self, draft: Draft) -> bool:
        if self._paused or self._probing or self.cost_source.timings == 0:
            return False
        assert draft.match_confidence is not None
        k, passes = len(draft.tokens), draft.passes or 0
        self._read(draft, k)
        matched = self._matched.chance(log_odds(draft.match_confidence[k]))
        drawn = self._upcoming.chance(self._log_odds[-1] if k else self._last)
        # After a match either model passes or the copy continue.
        model = self._after(passes, draft.next_is_read)
        taken = max(
            self._promise(k, matched, drawn, [0.0, *model]), self._promise(k, matched, matched, _FREE)
        )
        return self._promise(k, drawn, drawn, model) > taken

    def _after(self, passes: int, next_is_read: bool = False) -> Sequence[float]:
        """Return the times of 0, 1, ... further tokens of the drafter's model after so many passes in this step.

        A pass gives as many as usual, which is one where it reads no guesses. ``next_is_read``: see ``Draft``.
        """
        times, tokens = self._drafts_s[passes:], max(1.0, self._drawn / self._made)
        if tokens > 1.0:
            places = [0.0, *(max(1.0, j / tokens) for j in range(1, len(times)))]
            times = [times[int(x)] + (x % 1.0) * (times[math.ceil(x)] - times[int(x)]) for x in places]
        later = [seconds - times[0] for seconds in times]
        return [0.0, *later] if next_is_read else later

    def _promise(self, k: int, chance: float, later: float, draft_s: Sequence[float]) -> float:
        """Return the expected tokens of the best draft after the first ``k``, less what its time earns otherwise.

        Args:
            k: Length of the draft so far.
            chance: The chance that the next token is accepted if the draft so far is.
            later: The same for each later token.
            draft_s: Seconds to draft j more tokens, as item j.
        """
        survival, tokens, best = self._survival * chance, 0.0, -math.inf
        for j in range(1, self._limit - k + 1):
            tokens += survival
            survival *= later
            seconds = draft_s[j] + self._verify_s[k + 1 + j] - self._verify_s[k + 1]
            best = max(best, tokens - self._rate * seconds)
        return best

    def _read(self, draft: Draft, count: int) -> None:
        """Compute the log-odds of the first ``count`` tokens, and their chance to survive."""
        for i in range(len(self._log_odds), count):
            self._log_odds.append(log_odds(confidence(draft, i)))
            self._survival *= self._curve(draft, i).chance(self._log_odds[i])

    def _curve(self, draft: Draft, i: int) -> OnlineLogistic:
        """Return the curve for token ``i``: match confidences and probabilities have different scales."""
        return self._matched if self._copies or is_free(draft, i) else self._drafted

    # -- learning ----------------------------------------------------------------------------------

    def observe(self, step: Step) -> None:
        self._step += 1
        passes = step.gamma if step.passes is None else step.passes
        self.cost_source.observe(step, self._asked, passes)
        self._learn(step)
        if step.tested:
            self._usual += _NEW * (self._last - self._usual)
        else:  # what was tested before the last step says nothing of the next one
            self._last = self._usual
        test_s = self._test_s
        if passes > 0:
            self._unread = 0
        if not self._asked:
            self._credit = min(self._credit + _PROBING * self._verify_s[1], test_s)
        elif self._probing and passes > 0:
            self._credit += min(step.accepted, passes) / self._rate - test_s
        self._asked = True
        self._learn_passes(passes)
        self._start_step()
        self._tokens = _MEMORY * self._tokens + len(step.tokens)
        for counts, made in ((self._passes, passes), (self._widths, step.verified)):
            for each in counts:
                counts[each] *= _MEMORY
            counts[made] += 1.0
        self._weigh()

    def _learn_passes(self, passes: int) -> None:
        """Learn how many tokens a pass of the drafter's model gives in a chain."""
        draft = self._draft
        if passes == 0 or draft is None:
            return
        drawn = sum(not is_free(draft, i) for i in range(len(draft.tokens)))
        self._drawn = _MEMORY * self._drawn + drawn
        self._made = _MEMORY * self._made + passes

    def _learn(self, step: Step) -> None:
        """Learn from the outcome of the draft, and of a guess that was not drafted."""
        if (draft := self._draft) is None:
            return
        self._read(draft, step.tested)  # the last one may be unread
        for i in range(step.tested):
            accepted = i < step.accepted
            if not is_free(draft, i):  # it predicts tokens that cost a pass
                self._upcoming.learn(self._last, accepted)
            self._curve(draft, i).learn(self._log_odds[i], accepted)
            self._last = self._log_odds[i]
        k = len(draft.tokens)
        if draft.rejected_guess is not None and step.accepted == k < len(step.tokens):
            assert draft.match_confidence is not None
            self._curve(draft, k).learn(
                log_odds(draft.match_confidence[k]), step.tokens[k] == draft.rejected_guess
            )

    def _weigh(self) -> None:
        """Update costs and rate."""
        self._reading_s = 0.0
        if self._unread:
            share = self._prior.reading_share
            self._reading_s = self.cost_source.reading_s(self._unread, share, share * self._prefill_s)
        d = self._drafts_s = self.cost_source.drafts_s(max(self.gamma_max, *self._passes, 0))
        v = self._verify_s = self.cost_source.verify_s(max(self.gamma_max + 2, *self._widths, 0))
        self._probe_s = d[1] + v[2] - v[1] + self.cost_source.catching_up_s
        tokens = expected_tokens_by_position([self._upcoming.chance(self._last)] * self.gamma_max)
        steps_s = [drafting + v[gamma + 1] for gamma, drafting in enumerate(d[: len(tokens)])]
        gamma = best_length(tokens, d.__getitem__, v)
        spent = sum(count * d[k] for k, count in self._passes.items())
        spent += sum(count * v[n] for n, count in self._widths.items())
        reached = (self._tokens + _PRIOR_STEPS * tokens[gamma]) / (spent + _PRIOR_STEPS * steps_s[gamma])
        if self._reading_s > 0:  # plain steps so far say nothing of what drafts will reach
            reached = max(reached, tokens[gamma] / steps_s[gamma])
        self._rate = self.cost_source.rate(_LEAST_SHARE * reached, 1.0 / v[1])

    def notes(self) -> Mapping[str, float]:
        notes = {"rate": self._rate, "survival": self._survival, "probe": float(self._probing)}
        if self._reading_s > 0 and self._step:
            notes[READING_NOTE] = self._reading_s
        return notes

    def costs(self) -> Json:
        return self.cost_source.to_dict()
