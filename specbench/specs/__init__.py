"""The notation of the command line for drafters, draft-length rules and models."""
