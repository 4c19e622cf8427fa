"""One decoding loop and what it is made of: protocols, verdicts, sampling, stops, clocks, records."""
