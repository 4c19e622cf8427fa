"""Finding settings for a target on this machine."""
