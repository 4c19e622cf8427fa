"""From a model spec to a loaded target or drafter."""
