"""Graphs: CUDA graphs that are used one after another."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[[Tensor, Tensor], Tensor]  # takes tokens [B] and a slot [1], see CachedSampler


class Graphs:
    """CUDA graphs that share memory, because only the newest one is used.

    The allocator keeps the memory of a graph that is gone until it runs out of other memory. The driver may
    fail before that.
    """

    def __init__(self) -> None:
        self._newest: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None  # a single one, because each stream has its own memory

    def capture(self, step: Step, tokens: Tensor, slot: Tensor) -> Step:
        """Returns ``step``; on a GPU as a graph, because launching its many small kernels takes long.

        What the graph returns is overwritten by the next call. After a later capture, do not call it again.

        Args:
            step: writes the same memory if it is called twice with the same inputs.
            tokens, slot: inputs of the first call.
        """
        if not tokens.is_cuda:
            return step
        inputs = tokens.clone(), slot.clone()
        stream = self._stream = self._stream or torch.cuda.Stream()
        graph, pool = torch.cuda.CUDAGraph(), self._newest.pool() if self._newest else None
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(*inputs)  # libraries allocate their workspaces before the capture
            graph.capture_begin(pool, capture_error_mode="thread_local")
            result = step(*inputs)
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self._newest = graph

        def replay(tokens: Tensor, slot: Tensor) -> Tensor:
            for own, new in zip(inputs, (tokens, slot), strict=True):
                own.copy_(new)
            graph.replay()
            return result

        return replay
