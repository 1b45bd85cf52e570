"""Finds the first result of a program that is not finite, for ``LLM(debug_nan=True)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from qwen4exp_trt.runtime.program import Program, identifier_from_path, is_getitem, path_from_identifier

_CHECKED = (torch.float32, torch.bfloat16, torch.float16)


class NanTrace:
    """Runs a program op by op, and keeps of each result in which rows of the step it is finite.

    A step changes the states that it reads, so it cannot be run again to look for what went wrong: each step is
    watched while it runs. Results with a row for each token, or for each row of logits, are told apart by token; one of
    another shape that is not finite counts for all.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._args: Sequence[Any] = ()
        self._names: list[str] = []
        self._is_finite = torch.empty((0, 0), dtype=torch.bool)

    def run(self, *args: Any) -> Any:
        """In place of the program's module: ``execute`` of `Program.run`."""
        watch = _Watch(self._program, args)
        results = watch.run(*args)
        self._args, self._names = args, list(watch.is_finite)
        self._is_finite = torch.stack(list(watch.is_finite.values())).cpu()
        return results

    def first_not_finite(self, rows: range) -> str | None:
        """What of the last step is the first that is not finite in some of ``rows``, in words; None if nothing is."""
        places = (~self._is_finite[:, rows.start : rows.stop]).any(1).nonzero().flatten().tolist()
        if not places:
            return None
        name = self._names[places[0]]
        text = f"the first result that is not finite is that of {path_from_identifier(name)}"
        weights = self._bad_weights(name)
        return f"{text}, of whose weights {', '.join(weights)} have such values" if weights else text

    def _bad_weights(self, name: str) -> list[str]:
        (node,) = (node for node in self._program.graph.nodes if node.name == name)
        op = node.args[0] if is_getitem(node) else node
        assert isinstance(op, fx.Node)
        read = {operand.name for operand in op.all_input_nodes}
        args = dict(zip(self._program.placeholder_names(), self._args, strict=True))
        weights = {spec.name: identifier_from_path(spec.name) for spec in self._program.weights}
        return [path for path, name in weights.items() if name in read and not _is_finite(args[name])]


class _Watch(fx.Interpreter):
    """One step. ``is_finite``: by node, for each token of the step."""

    def __init__(self, program: Program, args: Sequence[Any]) -> None:
        super().__init__(program.module)
        inputs = {spec.name: value for spec, value in zip(program.inputs, args, strict=False)}
        self._num_tokens = len(inputs["input_ids"])
        self._logits_rows = inputs["logits_indices"].long()
        self.is_finite: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and isinstance(result, Tensor) and result.dtype in _CHECKED:
            self.is_finite[n.name] = self._by_token(result)
        return result

    def _by_token(self, result: Tensor) -> Tensor:
        num_rows = result.shape[0] if result.dim() else 0
        of_rows = torch.isfinite(result).flatten(1).all(1) if num_rows else torch.isfinite(result).all()
        if num_rows == len(self._logits_rows) and num_rows != self._num_tokens:
            whole = torch.ones(self._num_tokens, dtype=torch.bool, device=result.device)
            return whole.index_put((self._logits_rows,), of_rows)
        return of_rows if num_rows == self._num_tokens else of_rows.all().expand(self._num_tokens)


def _is_finite(value: Tensor) -> bool:
    """Formats that have no infinity, or that are scaled, are taken to be."""
    return value.dtype not in _CHECKED or bool(torch.isfinite(value).all())
