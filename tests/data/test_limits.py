"""Images that would cost much more than their size suggests are refused before they are decoded."""

import io
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers.images import draw_image, encode
from PIL import Image

from deepsquare.data import available, pil
from deepsquare.data.limits import MAX_MARKERS, MAX_SLOW_PIXELS, check_cost, jpeg_size
from deepsquare.data.source import DecodeError, read_file
from deepsquare.data.transforms import center_crop
from deepsquare.preprocessing import Preprocessing

SMALL = encode(draw_image(40, 30))
SMALL_PNG = encode(draw_image(40, 30), form="PNG")
EMPTY_SCAN = b"\xff\xda\0\x08\x01\x01\0\0\x3f\0"  # of one channel


def jpeg(segments: bytes = b"", scans: bytes = b"", side: int = 9400) -> bytes:
    """A sequential JPEG that claims to be large, with further segments and scans."""
    data = bytearray(encode(draw_image(16, 16)))
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = struct.pack(">HH", side, side)
    return bytes(data[:2] + segments + data[2 : data.index(b"\xff\xda")] + scans + b"\xff\xd9")


def decoy() -> bytes:
    """A segment that a parser skips whole if it takes FF 00 for a marker, and libjpeg reads a comment in it."""
    frame = b"\xff\xc0\0\x11\x08" + struct.pack(">HH", 8, 8) + b"\x03\x01\x22\0\x02\x11\x01\x03\x11\x01"
    scan = b"\xff\xda\0\x0c\x03\x01\0\x02\x11\x03\x11\0\x3f\0"
    return (
        b"\xff\0" + struct.pack(">H", 26) + b"\xff\xfe" + struct.pack(">H", 200) + b"A" * 20 + (frame + scan).ljust(178)
    )


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def rle_bmp(width: int, height: int, codes: bytes) -> bytes:
    header = struct.pack("<IHHI", 0, 0, 0, 1078) + struct.pack(
        "<IiiHHIIiiII", 40, width, height, 1, 8, 1, 0, 0, 0, 256, 0
    )
    return b"BM" + header + b"\1\2\3\0" * 256 + codes


def strips(count: int) -> bytes:
    """A TIFF of one column, in which each row is a strip."""
    tags = {256: (4, 1, 1), 257: (4, 1, count), 258: (3, 1, 8), 259: (3, 1, 1), 262: (3, 1, 1), 273: (3, count, 8)}
    tags |= {277: (3, 1, 1), 278: (4, 1, 1), 279: (4, 1, 1)}
    directory = b"".join(struct.pack("<HHII", tag, *values) for tag, values in tags.items())
    return (
        b"II*\0"
        + struct.pack("<I", 8 + 2 * count)
        + b"\x08\0" * count
        + struct.pack("<H", len(tags))
        + directory
        + bytes(4)
    )


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty scans": (lambda: jpeg(scans=EMPTY_SCAN * 2000), "2,000 scans of 9400 × 9400 pixels; expected at most 50"),
    "scans behind a decoy": (lambda: jpeg(decoy(), EMPTY_SCAN * 2000), "2,001 scans of 9400 × 9400"),
    "JPEG markers": (
        lambda: SMALL[:2] + b"\xff\xfe\0\x02" * 5000 + SMALL[2:],
        "too many parts|400 markers before the first",
    ),
    "run-length BMP": (lambda: rle_bmp(2**11, 2**10 + 1, b"\1\1\0\0" * 1025), "2048 × 1025 pixels of a kind"),
    "PPM of 254": (lambda: b"P6 2048 1025 254\n" + bytes(2048 * 1025 * 3), "2048 × 1025 pixels of a kind"),
    "plain PGM": (lambda: b"P2 2048 1025 255\n" + b"1 " * 2048 * 1025, "2048 × 1025 pixels of a kind"),
    "plain comments": (lambda: b"P2 2 2 255\n" + b"#\n" * 2000 + b"1 1 1 1\n", "more than 1,000 comments"),
    "header comment": (lambda: b"P6 2 2 #" + b"a" * 9000 + b"\n255\n" + bytes(12), "too many parts"),
    "PNG chunks": (lambda: SMALL_PNG[:33] + chunk(b"abCd", b"") * 2000 + SMALL_PNG[33:], "more chunks in a PNG"),
    "chunks at the end": (lambda: SMALL_PNG[:-12] + chunk(b"abCd", b"") * 2000 + SMALL_PNG[-12:], "more chunks"),
    "empty pixel chunks": (lambda: SMALL_PNG[:33] + chunk(b"IDAT", b"") * 100_001 + SMALL_PNG[33:], "more chunks"),
    "TIFF strips": (lambda: strips(200_001), "tag 273 of the TIFF has 200,001 values; expected at most 200,000"),
}


def decoders() -> list[Callable[..., None]]:
    if not available("fast"):
        return [pil.decode]
    from deepsquare.data import turbojpeg

    return [pil.decode, turbojpeg.decode]


@pytest.mark.parametrize("case", HOSTILE)
def test_costly_images_are_refused(case: str) -> None:
    make, message = HOSTILE[case]
    data, out = make(), np.empty((16, 16, 3), np.uint8)
    for decode in decoders():
        with pytest.raises(DecodeError, match=message):
            decode(data, partial(center_crop, Preprocessing(size=16, resize=16)), out)


def test_the_same_kinds_are_decoded_where_they_are_small() -> None:
    crop = partial(center_crop, Preprocessing(size=16, resize=16))
    files = (
        SMALL[:2] + b"\xff\xfe\0\x02" * (MAX_MARKERS - 20) + SMALL[2:],
        SMALL_PNG[:33] + chunk(b"abCd", b"") * 400 + SMALL_PNG[33:],
        jpeg(scans=EMPTY_SCAN * 3, side=64),
        rle_bmp(64, 64, b"\x40\1\0\0" * 64),
        b"P6 64 64 254\n" + bytes(64 * 64 * 3),
        b"P2 2 2 255\n#\n1 1 1 1\n",
        strips(300),
    )
    for data in files:
        for decode in decoders():
            decode(data, crop, np.empty((16, 16, 3), np.uint8))
    assert MAX_SLOW_PIXELS >= 1920 * 1080


def test_only_the_frame_that_libjpeg_decodes_is_believed() -> None:
    assert jpeg_size(SMALL) == (40, 30)
    assert jpeg_size(jpeg(decoy())) is None, "its decoy says 8 × 8"
    second = SMALL[SMALL.index(b"\xff\xc0") :][:19]
    assert jpeg_size(SMALL.replace(second, second * 2)) is None, "which of two frames counts is not defined"
    assert jpeg_size(SMALL[:2] + b"\xff\x01" + SMALL[2:]) is None
    assert jpeg_size(SMALL[:2] + b"\xff" + SMALL[2:]) == (40, 30), "with padding"
    assert jpeg_size(b"\xff\xd8" + second[:4] + b"\xff\xd9") is None
    with pytest.raises(DecodeError, match="400 markers"):
        jpeg_size(b"\xff\xd8" + b"\xff" * 10_000 + SMALL[2:])


def test_bytes_that_look_like_scans_do_not_refuse_ordinary_jpegs() -> None:
    thumbnail = b"\xff\xe1" + struct.pack(">H", 2 + 10 * 60) + EMPTY_SCAN * 60
    out = io.BytesIO()
    Image.new("RGB", (64, 64)).save(out, "JPEG")
    data = out.getvalue()
    check_cost(data[:2] + thumbnail + data[2:], 9400, 9400)  # one scan of all channels: libjpeg decodes no other
    check_cost(data.replace(b"\xff\xd9", b"\xff\xda\xff\xff" * 60 + b"\xff\xd9"), 9400, 9400)


def test_a_file_of_more_than_300_mb_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse.bmp"
    with path.open("wb") as file:
        file.truncate(300_000_001)
    with pytest.raises(DecodeError, match="300,000,001 bytes; expected at most 300,000,000"):
        read_file(path)
