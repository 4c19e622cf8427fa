"""Servers of the OpenAI protocol: asking them, what kinds of them understand, starting and ending them."""
