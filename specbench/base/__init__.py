"""The base of all other folders: errors, files, records, safe text, progress."""
