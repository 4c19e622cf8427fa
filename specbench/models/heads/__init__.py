"""Trained heads: their files, configurations and weights."""
