"""Renderers: tables, plots, traces, reports. They read records or data frames and never import torch."""
