"""From a Hugging Face config and checkpoint to a `runtime.program.Program`."""

if __name__ != "qwen4exp_trt.frontend":
    raise ImportError("import qwen4exp_trt.frontend: under another name it would be a second copy")
