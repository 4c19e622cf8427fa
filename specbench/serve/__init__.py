"""Our own decoding behind the OpenAI protocol."""
