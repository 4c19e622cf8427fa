"""Export of measured settings: the command line, file or program that switches one on in another engine."""
