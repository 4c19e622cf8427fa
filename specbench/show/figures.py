"""The figures of a run; ``specbench.show.plots`` draws them."""

FIGURES = {
    "speedup": ("speedup against γ, or of each server", "Speed"),
    "batches": ("speedup against batch size", "Speed"),
    "contexts": ("speedup against length of context", "Speed"),
    "positions": ("acceptance by position in the draft", "Acceptance by position"),
    "time": ("where the time goes", "Speed"),
}
"""What each shows, and the heading of the report's table with its numbers, by name in the order of a report."""
