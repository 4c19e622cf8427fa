"""Basics that all other folders use: errors, files, records, safe text, progress."""
