"""What every other folder stands on: errors, files, records, safe text, progress."""
