"""Decoders that a sweep can measure."""
