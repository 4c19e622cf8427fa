"""Loading of targets and drafters from their specs."""
