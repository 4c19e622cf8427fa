"""Engines that a sweep can measure: loaded models and servers."""
