"""Finding settings for a target on this machine, and handing them on."""
