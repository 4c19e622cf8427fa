"""Is a configuration lossless? Greedy outputs, sampled distributions, and what must hold in every step.

``docs/check.md`` says what is checked and what the verdicts mean. The parts: ``observe`` runs the decoding loop and
keeps what it did; ``invariants``, ``exact``, ``deviation`` and ``chisquare`` judge that, and know nothing of running;
``greedy``, ``sampled`` and ``outputs`` put both together; ``results`` holds what comes out and ``render`` shows it.
"""
