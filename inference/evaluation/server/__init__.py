"""Acceptance and speed of a running vLLM, SGLang or llama.cpp server."""
