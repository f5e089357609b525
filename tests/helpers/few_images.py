"""The training benchmark on few images, in the processes of its candidates."""

from pathlib import Path

from deepsquare.data import cifar10
from deepsquare.data.cifar10 import Cifar10, DataUnavailableError
from deepsquare.paper.bench import train

time_candidate = train._time


def no_data(folder: str | Path | None = None, *, cache: str | Path | None = None) -> Cifar10:
    raise DataUnavailableError("no network")


def time_with_few_images(name: str, folder: Path | None, steps: int) -> float:
    """``train._time`` without a network, with 512 random images in place of 50,000."""
    cifar10.load_cifar10, train.IMAGES_PER_EPOCH = no_data, 512
    return time_candidate(name, folder, steps)
