"""A fake of CUDA graphs: replay runs the captured function again, on the same tensors."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class ReplayedGraph:
    work: Callable[[], None]
    num_replays: int = 0

    def replay(self) -> None:
        self.num_replays += 1
        self.work()


@dataclass
class ReplayingCapturer:
    graphs: list[ReplayedGraph] = field(default_factory=list)

    def capture(self, work: Callable[[], None]) -> ReplayedGraph:
        work()
        graph = ReplayedGraph(work)
        self.graphs.append(graph)
        return graph

    @property
    def num_replays(self) -> list[int]:
        """Per graph, in the order of capture."""
        return [graph.num_replays for graph in self.graphs]
