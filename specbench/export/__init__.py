"""A setting in the words of other engines: how what was measured here is switched on where it is deployed."""
