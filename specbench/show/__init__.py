"""Renderers: tables, plots, traces, reports. They read records or data frames, never torch."""
