"""What one TensorRT module has and the other lacks. It is asked for here and nowhere else in the runtime.

TensorRT for RTX compiles an engine's own kernels when it runs: so it has a cache of them, a choice of when kernels for
shapes are compiled, CUDA graphs of its own, and can say whether an engine fits before it is loaded. TensorRT has none.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.load_options import CudaGraphs


class Capabilities:
    """Those of the module ``trt``."""

    def __init__(self, trt: ModuleType) -> None:
        self.trt = trt
        self.compiles_at_run_time = hasattr(trt, "IRuntimeCache")
        """Whether the engine's kernels are compiled when it runs, and can be cached."""

    def check_graphs(self, choice: CudaGraphs) -> None:
        """`BundleError` for a choice that the module does not have."""
        if choice == CudaGraphs.TENSORRT and not hasattr(self.trt, "CudaGraphStrategy"):
            raise BundleError(
                f"cuda_graphs (--cuda-graphs) is 'tensorrt', but {self.trt.__name__} makes no CUDA graphs itself, only "
                "TensorRT for RTX does; use 'own'"
            )

    def choose_graphs(self, config: Any, choice: CudaGraphs) -> None:
        """For the contexts of the ``IRuntimeConfig``."""
        if hasattr(self.trt, "CudaGraphStrategy"):
            strategies = self.trt.CudaGraphStrategy
            is_tensorrts = choice == CudaGraphs.TENSORRT
            config.cuda_graph_strategy = strategies.WHOLE_GRAPH_CAPTURE if is_tensorrts else strategies.DISABLED

    def choose_specialization(self, config: Any, is_captured: bool) -> None:
        """When kernels are compiled for the shapes that a context of ``config`` is given.

        A captured graph keeps the kernels that it was captured with, so they have to be there before: EAGER waits for
        them. Steps that are not captured have any length; LAZY runs a fallback while theirs are compiled.
        """
        if hasattr(self.trt, "DynamicShapesKernelSpecializationStrategy"):
            strategies = self.trt.DynamicShapesKernelSpecializationStrategy
            config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER if is_captured else strategies.LAZY

    def is_capturable(self, context: Any, stream: int) -> bool:
        """Whether what ``context`` enqueues for its current shapes can be captured; True if nobody can say."""
        return context.is_stream_capturable(stream) if hasattr(self.trt, "CudaGraphStrategy") else True

    def engine_problems(self, runtime: Any, engine: Any) -> tuple[bool, list[str]]:
        """Whether the serialized ``engine`` can run here, and what TensorRT has to say about it."""
        if not hasattr(self.trt, "EngineValidity"):
            return True, []
        validity, found = runtime.get_engine_validity(engine)
        reasons = self.trt.EngineInvalidityDiagnostics.__members__.items()
        names = [name.lower().replace("_", " ") for name, reason in reasons if int(found) & int(reason)]
        return validity != self.trt.EngineValidity.INVALID, names
