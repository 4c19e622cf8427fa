"""Check that a configuration or a running server is lossless: greedy outputs, sampled distributions, and invariants.

``docs/check.md`` says what is checked and what the verdicts mean. ``observe`` runs the decoding loop and records what
it does; ``invariants``, ``exact`` and ``deviation`` judge records and run nothing; ``greedy``, ``sampled`` and
``outputs`` combine both; ``run`` holds the findings. ``servers`` asks servers, and ``bias`` tests what they draw.
``render`` shows the results.
"""
