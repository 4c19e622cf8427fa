"""How requests come to a server that decodes several at a time: from clients that wait for answers, or at random."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from random import Random

from specbench.base.errors import UsageError

MOST_CLIENTS = 1024
FASTEST, SLOWEST = 1000.0, 0.001
"""Requests per second that can be asked for."""

_FORMS = "Write closed:N for N clients, or poisson:RATE for requests per second."


@dataclass(frozen=True, slots=True)
class Closed:
    """A closed loop: each client sends a request, waits for the whole answer, and sends the next one at once."""

    clients: int

    def __str__(self) -> str:
        return f"closed:{self.clients}"


@dataclass(frozen=True, slots=True)
class Poisson:
    """An open loop: requests come at random times, ``rate`` per second on average, whatever is still under way."""

    rate: float

    def __str__(self) -> str:
        return f"poisson:{self.rate:g}"

    def times(self, count: int, random: Random) -> list[float]:
        """Seconds at which so many requests come, ascending; the time between two is exponentially distributed."""
        times, now = [], 0.0
        for _ in range(count):
            now += random.expovariate(self.rate)
            times.append(now)
        return times


Arrivals = Closed | Poisson


def parse_arrivals(text: str) -> Arrivals:
    """How requests come, from ``closed:N`` or ``poisson:RATE``.

    Raises:
        UsageError: It is neither, or a number is out of its range.
    """
    word, _, value = text.strip().partition(":")
    if word == "closed" and re.fullmatch(r"\d{1,9}", value, re.ASCII):
        clients = int(value)
        if not 1 <= clients <= MOST_CLIENTS:
            raise UsageError(f"There are {clients} clients in {text!r}.", f"Give 1 to {MOST_CLIENTS}.")
        return Closed(clients)
    if word == "poisson" and re.fullmatch(r"(\d{1,9}\.?\d{0,9}|\.\d{1,9})", value, re.ASCII):
        rate = float(value)
        if not (math.isfinite(rate) and SLOWEST <= rate <= FASTEST):
            raise UsageError(
                f"The rate of {text!r} is {rate:g} requests per second.", f"Give {SLOWEST:g} to {FASTEST:g}."
            )
        return Poisson(rate)
    raise UsageError(f"{text!r} is no way for requests to come.", _FORMS)
