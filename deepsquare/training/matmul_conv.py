"""Convolutions as matrix products: for some shapes a BLAS is faster on the CPU than the convolutions of oneDNN.

Which ones depends on the machine. For deep layers with small maps it is mostly the gradient of the weights.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def use_matmul(model: nn.Module, names: Iterable[str]) -> None:
    """Compute these convolutions of a model as matrix products in training; evaluation and state_dict stay as before.

    Meant for torch.compile, which makes the patches in one pass; without it, the copies take longer than they save.
    """
    for name in names:
        conv = model.get_submodule(name)
        if not _is_supported(conv):
            raise ValueError(f"{name} is {conv}; expected a Conv2d without bias, groups or dilation")
        conv.forward = MethodType(_forward, conv)


def conv2d_as_matmul(x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
    """``F.conv2d`` of (N, C, H, W) in channels_last as one matrix product; the result is in channels_last too."""
    out_channels, in_channels, height, width = weight.shape
    rows, columns = ((size + 2 * pad - kernel) // step + 1 for size, pad, kernel, step in
                     zip(x.shape[2:], padding, (height, width), stride, strict=True))  # fmt: skip
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
    pixels = padded.permute(0, 2, 3, 1)
    shifted = [
        pixels[:, i : i + stride[0] * (rows - 1) + 1 : stride[0], j : j + stride[1] * (columns - 1) + 1 : stride[1]]
        for i in range(height)
        for j in range(width)
    ]
    patches = torch.cat(shifted, -1) if len(shifted) > 1 else shifted[0]
    product = patches.reshape(-1, height * width * in_channels) @ weight.permute(2, 3, 1, 0).reshape(-1, out_channels)
    return product.view(len(x), rows, columns, out_channels).permute(0, 3, 1, 2)


def faster_as_matmul(model: nn.Module, images: Tensor, repeats: int = 7) -> tuple[str, ...]:
    """The convolutions of a model that a training step computes faster as matrix products, by measuring each shape.

    Runs the model once on the images; the caller passes a copy.
    """
    inputs: dict[str, Tensor] = {}

    def record(name: str, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs[name] = arguments[0].detach()

    convs = {name: module for name, module in model.named_modules() if _is_supported(module)}
    handles = [module.register_forward_pre_hook(partial(record, name)) for name, module in convs.items()]
    with torch.no_grad():
        model.train()(images)
    for handle in handles:
        handle.remove()
    faster: dict[object, bool] = {}
    for name, x in inputs.items():
        conv = convs[name]
        shape = (x.shape, conv.weight.shape, conv.stride, conv.padding)
        if shape not in faster:
            faster[shape] = _faster(conv, x, needs_input_gradient=x.shape[1] != images.shape[1], repeats=repeats)
    return tuple(
        name
        for name, x in inputs.items()
        if faster[x.shape, convs[name].weight.shape, convs[name].stride, convs[name].padding]
    )


def _is_supported(module: nn.Module) -> bool:
    if type(module) is not nn.Conv2d or isinstance(module.padding, str):
        return False
    plain = module.groups == 1 and module.bias is None and module.dilation == (1, 1)
    return plain and module.padding_mode == "zeros"


def _forward(conv: nn.Conv2d, x: Tensor) -> Tensor:
    if not conv.training:
        return F.conv2d(x, conv.weight, None, conv.stride, conv.padding)
    assert not isinstance(conv.padding, str)
    return conv2d_as_matmul(x, conv.weight, (conv.stride[0], conv.stride[1]), (conv.padding[0], conv.padding[1]))


def _faster(conv: nn.Conv2d, x: Tensor, *, needs_input_gradient: bool, repeats: int) -> bool:
    """Whether the matrix products and the copies of a step take less time than the convolutions."""
    x = x.contiguous(memory_format=torch.channels_last)
    weight = conv.weight.detach().contiguous(memory_format=torch.channels_last)
    out = F.conv2d(x, weight, None, conv.stride, conv.padding)
    arguments = (conv.stride, conv.padding, conv.dilation, False, (0, 0), 1, (needs_input_gradient, True, False))

    def convolutions() -> None:
        F.conv2d(x, weight, None, conv.stride, conv.padding)
        torch.ops.aten.convolution_backward(out, x, weight, None, *arguments)

    matrix = weight.permute(2, 3, 1, 0).reshape(-1, len(weight))
    gradient = out.permute(0, 2, 3, 1).reshape(-1, len(weight))
    patches = gradient.new_ones(len(gradient), len(matrix))
    copies = matrix.shape[0] > x.shape[1]  # a 1×1 convolution has no patches to copy

    def products() -> None:
        (patches.clone() if copies else patches) @ matrix
        _ = patches.t() @ gradient
        if needs_input_gradient:
            product = gradient @ matrix.t()
            if copies:
                product.clone()

    times: dict[Callable[[], None], list[float]] = {convolutions: [], products: []}
    for _ in range(repeats + 1):  # the first round is a warm-up
        for call, seconds in times.items():
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    return min(times[products][1:]) < 0.95 * min(times[convolutions][1:])
