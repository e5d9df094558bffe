"""The server: the OpenAI protocol over one engine."""
