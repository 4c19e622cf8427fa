"""The version; it has a file of its own so that the build can read it without importing the package."""

__version__ = "0.9.0"
