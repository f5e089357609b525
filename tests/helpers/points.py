"""Points in the plane as training batches, for tests of the training loop."""

from collections.abc import Generator, Iterator

import torch
from torch import Tensor


class Points:
    """Clusters of points, one per class, ``distance`` apart along the diagonal."""

    def __init__(self, count: int = 64, batch_size: int = 16, classes: int = 2, distance: float = 4.0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.arange(count) % classes
        self.points = torch.randn(count, 2, generator=generator) + distance * self.labels[:, None]
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.labels) // self.batch_size

    def epoch(self, number: int, start: int = 0) -> Generator[tuple[Tensor, Tensor], None, None]:
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(number))
        for index in torch.split(order, self.batch_size)[start:]:
            yield self.points[index], self.labels[index]

    def evaluation(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.points, self.labels
