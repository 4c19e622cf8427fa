"""The notation of the command line for drafters, draft policies and models."""
