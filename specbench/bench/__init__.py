"""Sweeps: the configurations, the order of measurements, and the measuring itself."""
