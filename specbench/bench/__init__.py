"""Sweeps: what is compared, in which order, and carrying it out."""
