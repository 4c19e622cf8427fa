"""The notation of how requests arrive (``--arrivals``) and of when a sweep stops (``--until``)."""

from __future__ import annotations

import re
from itertools import accumulate
from random import Random
from typing import Annotated

from specbench.base.errors import UsageError
from specbench.base.record import Count, Record, Size, doc

MOST_CLIENTS = 1024
FASTEST, SLOWEST = 1000.0, 0.001
"""Limits of the rate, in requests per second."""


class Closed(Record, kw_only=False, tag="closed"):
    """A closed loop: each client sends a request, waits for the whole answer, and sends the next one."""

    clients: Annotated[Count, doc("how many wait for their answers")]

    def __str__(self) -> str:
        return f"closed:{self.clients}"


class Poisson(Record, kw_only=False, tag="poisson"):
    """An open loop: requests arrive at random times, ``rate`` per second on average."""

    rate: Annotated[Size, doc("requests per second")]

    def __str__(self) -> str:
        return f"poisson:{self.rate:g}"

    def times(self, count: int, random: Random) -> list[float]:
        """Return ``count`` arrival times in seconds, ascending, with exponentially distributed gaps."""
        return [*accumulate(random.expovariate(self.rate) for _ in range(count))]


Arrivals = Closed | Poisson


def parse_arrivals(text: str) -> Arrivals:
    """Parse ``closed:N`` or ``poisson:RATE``; raise ``UsageError`` for anything else."""
    word, _, value = text.strip().partition(":")
    if word == "closed" and re.fullmatch(r"\d{1,9}", value, re.ASCII):
        clients = int(value)
        if not 1 <= clients <= MOST_CLIENTS:
            raise UsageError(f"There are {clients} clients in {text!r}.", f"Give 1 to {MOST_CLIENTS}.")
        return Closed(clients)
    if word == "poisson" and re.fullmatch(r"(\d{1,9}\.?\d{0,9}|\.\d{1,9})", value, re.ASCII):
        rate = float(value)
        if not SLOWEST <= rate <= FASTEST:
            raise UsageError(
                f"The rate of {text!r} is {rate:g} requests per second.", f"Give {SLOWEST:g} to {FASTEST:g}."
            )
        return Poisson(rate)
    forms = "Write closed:N for N clients, or poisson:RATE for requests per second."
    raise UsageError(f"{text!r} is not a workload.", forms)


class Until(Record, kw_only=False):
    """When a sweep stops: when the fastest is known (``None``), or when its interval is this narrow."""

    half_width: Annotated[Size | None, doc("share of the speedup")] = None

    def __str__(self) -> str:
        return "sure" if self.half_width is None else f"{100 * self.half_width:g}%"


def parse_until(text: str) -> Until:
    """Parse ``sure``, or the half-width of an interval as ``5%``.

    Raises:
        UsageError: It is neither, or not between 0.5% and 50%.
    """
    return Until(None if text == "sure" else parse_percent("--until", text, "sure, or a width"))


def parse_percent(option: str, text: str, form: str = "a share") -> float:
    """Return the share that an option gives as ``5%``; ``form`` is what else it takes.

    Raises:
        UsageError: It is none, or not between 0.5% and 50%.
    """
    found = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?) ?%", text, re.ASCII)
    if found is None:
        raise UsageError(f"{option} is {text!r}.", f"Give {form} such as 5%.")
    share = float(found[1]) / 100
    if not 0.005 <= share <= 0.5:
        raise UsageError(f"{option} is {text}.", "Give 0.5% to 50%.")
    return share
