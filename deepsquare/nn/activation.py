"""Elementwise squares."""

from torch import Tensor, nn

from deepsquare import functional as DF


class EleSquare(nn.Module):
    """EleSquare, Equation (14): t², elementwise."""

    def forward(self, x: Tensor, beta: Tensor | None = None) -> Tensor:
        return DF.square(x, beta)


class ReLUSquare(nn.Module):
    """ReLU-Square, Equation (19): max(0, t)², elementwise."""

    def forward(self, x: Tensor) -> Tensor:
        return DF.relu_square(x)


class SquareEncoding(EleSquare):
    """Square-Encoding (SEn): EleSquare as the input of the last spatial convolution of a main branch."""
