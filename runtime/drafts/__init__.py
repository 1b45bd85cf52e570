"""Drafts (speculative decoding): proposers of tokens, and what verifies them in one step of the model."""
