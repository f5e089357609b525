"""Measure candidates side by side, interleaved in rounds within one run."""

from collections.abc import Callable


def commands() -> dict[str, Callable[..., None]]:
    """The benchmarks by name."""
    from deepsquare.paper.bench import activations, data, deployment, excitation_onnx, models, ops, train

    return {
        "train": train.run,
        "models": models.run,
        "ops": ops.run,
        "activations": activations.run,
        "data": data.run,
        "deployment": deployment.run,
        "excitation-onnx": excitation_onnx.run,
    }
