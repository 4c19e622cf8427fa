"""The page that `specbench trace --html` writes."""
