"""``qwen4exp-bench``: times a bundle on the machine at hand. Nothing of the runtime imports this package."""
