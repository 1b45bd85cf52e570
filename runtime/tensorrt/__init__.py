"""The TensorRT side of the runtime: its module, a bundle's engine, and the backend that executes it."""
