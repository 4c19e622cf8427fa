"""Passes of ``transformers`` models on torch: scorer, caches and trials."""
