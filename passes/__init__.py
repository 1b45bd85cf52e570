"""Graph passes over `runtime.program.Program`: one file a pass, their order in `passes.pipeline`."""
