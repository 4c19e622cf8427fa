"""Runs on disk, their figures, and what is doubtful about them."""
