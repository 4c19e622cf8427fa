"""A server that decodes behind the OpenAI protocol."""
