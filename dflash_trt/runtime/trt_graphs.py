"""Runs steps on the stream, as CUDA graphs where that pays: which are captured, kept and let go.

A step is some thousand small kernels; a graph puts them on the stream in one call. A graph holds
the addresses and shapes that it was captured with, so there is one per `StepKey`, with a context of
its own: another shape in the same context would change what the graph's kernels read.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from dflash_trt.errors import GpuError
from dflash_trt.runtime.cuda import CaptureRefused, Cuda
from dflash_trt.runtime.trt_engine import StepContext
from dflash_trt.runtime.trt_steps import StepKey

log = logging.getLogger(__name__)

MAX_GRAPHS = 64
RARE = 2  # a prompt's last chunk has any width: most are never seen again
CROWDED = 16  # times that a step must come before it takes another one's place
REMEMBERED = 4  # kinds of steps that are counted, per graph that may be kept


@dataclass(frozen=True)
class StepWork:
    """What a session does around TensorRT, each for one kind of step.

    `bind` gives a context its shapes and addresses, `put` puts one step on the stream with it.
    """

    context: Callable[[int, bool], StepContext]  # of a profile; whether its shapes are fixed
    bind: Callable[[StepKey, StepContext], None]
    put: Callable[[StepKey, StepContext], None]


class StepRunner:
    """Runs one step at a time; keeps at most `max_graphs` graphs, the ones used last."""

    def __init__(self, cuda: Cuda, work: StepWork, block: int, max_graphs: int) -> None:
        """`max_graphs` 0 runs without graphs."""
        self._cuda, self._work, self._block = cuda, work, block
        self._max_graphs = max_graphs
        self._plain: dict[int, tuple[StepContext, StepKey | None]] = {}  # by profile; what it has
        self._graphs: OrderedDict[StepKey, _Captured] = OrderedDict()
        self._counts: OrderedDict[StepKey, int] = OrderedDict()

    @property
    def num_graphs(self) -> int:
        """Graphs that are kept now."""
        return len(self._graphs)

    def run(self, key: StepKey) -> bool:
        """Put a step on the stream; whether something new was made for it."""
        captured = self._graphs.get(key)
        if captured is not None:
            self._graphs.move_to_end(key)
            self._cuda.launch(captured.graph)
            return False
        if not self._is_worth_a_graph(key):
            return self._run_plain(key)
        try:
            context = self._work.context(key.profile, True)
            self._work.bind(key, context)
            # What depends on the shapes is settled by the first run, and a capture must not do it.
            self._work.put(key, context)
        except GpuError as error:  # another context may just not fit
            return self._give_up(key, error.message)
        graph = None
        if context.is_capturable:
            graph = self._cuda.capture(lambda: self._put_captured(key, context))
        else:
            log.warning("steps run without CUDA graphs: TensorRT cannot capture this engine")
        if graph is None:
            self._max_graphs = 0
            self._cuda.synchronize()  # the step runs with a context that goes now
            return True
        self._graphs[key] = _Captured(self._cuda, graph, context)
        while len(self._graphs) > self._max_graphs:
            self._graphs.popitem(last=False)[1].close()
        return True

    def _put_captured(self, key: StepKey, context: StepContext) -> None:
        try:
            self._work.put(key, context)
        except GpuError as error:
            raise CaptureRefused(error.message) from error

    def _run_plain(self, key: StepKey) -> bool:
        is_new = key.profile not in self._plain
        if is_new:
            self._plain[key.profile] = (self._work.context(key.profile, False), None)
        context, bound = self._plain[key.profile]
        if bound != key:
            self._plain[key.profile] = (context, None)  # until all of it is bound
            self._work.bind(key, context)
            self._plain[key.profile] = (context, key)
        self._work.put(key, context)
        return is_new

    def _give_up(self, key: StepKey, reason: str) -> bool:
        log.warning("steps run with the %d CUDA graphs that there are: %s", self.num_graphs, reason)
        self._max_graphs = self.num_graphs
        self._counts.clear()
        return self._run_plain(key)

    def _is_worth_a_graph(self, key: StepKey) -> bool:
        """Whether to capture a kind of step now; counts it."""
        if not self._max_graphs:
            return False
        count = self._counts[key] = self._counts.pop(key, 0) + 1
        while len(self._counts) > REMEMBERED * self._max_graphs:
            self._counts.popitem(last=False)
        if len(self._graphs) >= self._max_graphs:
            is_due = count >= CROWDED
        else:
            is_due = key.width <= self._block or count >= RARE
        if is_due:
            del self._counts[key]
        return is_due


class _Captured:
    """A graph, with the context whose kernels and memory it uses."""

    def __init__(self, cuda: Cuda, graph: object, context: StepContext) -> None:
        self.graph = graph
        self._context = context
        self.close = weakref.finalize(self, cuda.destroy, graph)
