"""Finding the fastest settings for a target on this machine."""
