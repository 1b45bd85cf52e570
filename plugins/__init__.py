"""The ``q4e::`` ops, one folder each: spec, CPU body, float32 reference and sample cases.

Importing this package registers nothing; call `qwen4exp_trt.plugins.registry.all_specs` to discover and register.
"""
