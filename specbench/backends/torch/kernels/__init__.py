"""Quicker ways through a model than ``transformers`` takes."""
