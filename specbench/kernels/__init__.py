"""Faster implementations of what ``transformers`` computes."""
