"""TensorRT's runtime without a GPU: a module that executes the ONNX that an engine was built from.

It is strict where TensorRT is, and where it is only silently wrong: see `context.Context` for what is bound,
`memory.Memory` for where that is, and `cpu_stream.CpuStream` for when it is read and written.
"""

from trt_simulator.errors import SimulatorError, violations
from trt_simulator.module import SimulatedTensorRT

__all__ = ["SimulatedTensorRT", "SimulatorError", "violations"]
