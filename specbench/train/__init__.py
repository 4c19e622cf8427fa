"""Training of heads on texts that the target itself writes."""
