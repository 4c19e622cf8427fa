"""Forward passes of ``transformers`` models on torch: scorer, caches and trials."""
