"""The errors a user can meet. Each message says what was found, where, what was expected and what to do."""

from __future__ import annotations


class Q4eError(Exception):
    """Base of every error this package raises for a user's mistake; the command line prints it without a traceback."""


class ConfigError(Q4eError):
    """A config.json value that the model does not allow."""


class CheckpointError(Q4eError):
    """A checkpoint whose files, tensor names, shapes or dtypes are not those that its config asks for."""


class PassError(Q4eError):
    """A pass whose precondition, postcondition, legality or numerics failed."""


class PluginError(Q4eError):
    """A ``q4e::`` op called with operands outside its spec, or a plugin that cannot run where it was asked to."""


class BuildError(Q4eError):
    """A program that cannot be lowered, or an engine that TensorRT refused to build."""


class BundleError(Q4eError):
    """A bundle that is incomplete, damaged or made by another version."""


class RequestError(Q4eError):
    """A generation request that cannot be served as asked."""


class PromptTooLongError(RequestError):
    """A prompt that leaves no room for a token in the longest sequence of the bundle or of its KV cache."""


class UnreadableRowsError(CheckpointError):
    """Rows of the n-gram table that a step needs and that cannot be read. Nothing was run, and no state has changed.

    ``errors``: why, by the place in the step of each sequence that needs some; the step can be run without these.
    """

    def __init__(self, errors: dict[int, CheckpointError]) -> None:
        super().__init__(str(next(iter(errors.values()))))
        self.errors = errors


class QueueFullError(RequestError):
    """A generation request that found as many open ones as are allowed; it may be sent again later."""


class DroppedError(RequestError):
    """A generation request that was accepted and could not be served to its end, through no fault of its own."""


class EngineError(Q4eError):
    """An engine that has stopped, with every request that it had, and takes no more."""


class CacheError(Q4eError):
    """A prefix cache that cannot be kept as asked."""


class ServerError(Q4eError):
    """A server that cannot be set up as asked."""
