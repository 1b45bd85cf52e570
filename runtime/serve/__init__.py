"""`qwen4exp-serve`: an OpenAI-compatible HTTP server on `AsyncLLM`. It needs the extra ``serve``."""
