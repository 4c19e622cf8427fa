"""Backends: the code that runs forward passes."""
