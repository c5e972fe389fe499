"""The vLLM plugin: sparse decoding behind an OpenAI-compatible server."""
