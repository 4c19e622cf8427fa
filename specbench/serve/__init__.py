"""A server that answers with the OpenAI protocol."""
