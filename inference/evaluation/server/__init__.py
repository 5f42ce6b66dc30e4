"""Acceptance and speed of a running vLLM or SGLang server."""
