"""Prediction from answers that exist already: what a drafter would have gained, without the target."""
