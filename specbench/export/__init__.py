"""Export of measured settings, as a command line, file or program for another engine."""
