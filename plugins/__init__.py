"""The ``q4e::`` ops, one folder each: spec, CPU body, float32 reference and sample cases.

Importing this package registers nothing; call `qwen4exp_trt.plugins.registry.all_specs` to discover and register.
"""

if __name__ != "qwen4exp_trt.plugins":
    raise ImportError("import qwen4exp_trt.plugins: under another name it would be a second copy")
