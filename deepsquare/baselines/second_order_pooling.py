"""Second-order poolings, which return more values than channels, for a wider classifier.

Each takes a map (N, C, H, W) to (N, ``out_channels``, 1, 1).
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepsquare.baselines import second_order


class SecondOrderPooling(nn.Module, ABC):
    """Pools a map to ``out_channels`` values, computed by ``values`` in float32 and returned in the map's dtype.

    The subclasses take the map's ``channels`` first; ``reduce`` is applied before the statistics are computed.
    """

    def __init__(self, reduce: nn.Module, out_channels: int) -> None:
        super().__init__()
        self.reduce = reduce
        self.out_channels = out_channels

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, out_channels, 1, 1)."""
        x = self.reduce(x)
        with second_order.fp32_context(x) as map_:
            values = self.values(map_)
        return values.to(x.dtype)[..., None, None]

    @abstractmethod
    def values(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, out_channels)."""


def _reduction(channels: int, size: int) -> nn.Sequential:
    """1×1 convolution, initialized as in ResNet and the authors' releases, batch normalization, ReLU."""
    conv = nn.Conv2d(channels, size, 1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(size), nn.ReLU(inplace=True))


class CovariancePooling(SecondOrderPooling):
    """MPN-COV (Li et al., 2017) and iSQRT-COV (Li et al., 2018): the square root of the channels' covariance.

    The channels are reduced to ``size``, which gives size·(size + 1)/2 values. ``iterations`` are those of the
    Newton–Schulz method (iSQRT-COV), 0 for the eigendecomposition (MPN-COV).
    """

    def __init__(self, channels: int, size: int = 256, iterations: int = 0) -> None:
        super().__init__(_reduction(channels, size), size * (size + 1) // 2)
        self.iterations = iterations

    def values(self, x: Tensor) -> Tensor:
        """The upper triangle of the matrix square root."""
        matrix = second_order.covariance(x)
        n = self.iterations
        root = second_order.root_by_newton_schulz(matrix, n) if n else second_order.root_by_eigenvalues(matrix)
        return second_order.upper_triangle(root)


class BilinearPooling(SecondOrderPooling):
    """Bilinear pooling (Lin et al., 2015), Equation (6): second moments, signed square root, L2 normalization.

    The channels are reduced to ``size``, which gives size² values, or for 0 not reduced.
    """

    def __init__(self, channels: int, size: int = 128) -> None:
        super().__init__(_reduction(channels, size) if size else nn.Identity(), (size or channels) ** 2)

    def values(self, x: Tensor) -> Tensor:
        """The normalized moments."""
        return F.normalize(second_order.signed_root(second_order.bilinear(x)))


class CompactBilinearPooling(SecondOrderPooling):
    """Compact bilinear pooling (Gao et al., 2016): a tensor sketch, of ``size`` values, of the second moments."""

    index: Tensor
    sign: Tensor

    def __init__(self, channels: int, size: int = 8192) -> None:
        super().__init__(nn.Identity(), size)
        self.register_buffer("index", torch.randint(size, (2, channels)))
        self.register_buffer("sign", 2.0 * torch.randint(2, (2, channels)) - 1)

    def values(self, x: Tensor) -> Tensor:
        """The normalized sketch."""
        sketch = second_order.tensor_sketch(x, self.index, self.sign.to(x.dtype), self.out_channels)
        return F.normalize(second_order.signed_root(sketch))
