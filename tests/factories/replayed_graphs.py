"""A fake of CUDA graphs: replay runs the captured function again, on the same tensors."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

Results = tuple[Tensor, Tensor]


@dataclass
class ReplayedGraph:
    work: Callable[[], Results]
    results: Results
    num_replays: int = 0

    def replay(self) -> None:
        self.num_replays += 1
        for result, new in zip(self.results, self.work(), strict=True):
            result.copy_(new)


@dataclass
class ReplayingCapturer:
    graphs: list[ReplayedGraph] = field(default_factory=list)

    def capture(self, work: Callable[[], Results]) -> tuple[ReplayedGraph, Results]:
        graph = ReplayedGraph(work, work())
        self.graphs.append(graph)
        return graph, graph.results

    @property
    def num_replays(self) -> list[int]:
        """Per graph, in the order of capture."""
        return [graph.num_replays for graph in self.graphs]
