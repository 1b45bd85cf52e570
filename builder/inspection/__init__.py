"""`qwen4exp-inspect`: what a bundle holds, layer by layer, read from its files alone."""
