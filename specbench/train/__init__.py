"""Training heads on what a target writes itself."""
