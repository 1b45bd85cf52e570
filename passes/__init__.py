"""Graph passes over `runtime.program.Program`: one file a pass, their order in `passes.pipeline`."""

if __name__ != "qwen4exp_trt.passes":
    raise ImportError("import qwen4exp_trt.passes: under another name it would be a second copy")
