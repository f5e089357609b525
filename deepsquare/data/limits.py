"""What decoding an image may cost in memory and time, however small its file: checked before it is decoded."""

import io
import struct
from contextlib import suppress
from typing import NamedTuple

from PIL import Image, ImageFile

from deepsquare.data.source import DecodeError
from deepsquare.data.transforms import MAX_PIXELS

MAX_SCANNED = 50 * MAX_PIXELS  # pixels × scans of a JPEG; libjpeg decodes 2 billion or more per second
MAX_SLOW_PIXELS = 2**21  # decoded by a loop in Python, about a million per second; 1920 × 1080 are fewer
MAX_HEADER_READS, MAX_READS = 2000, 5_000_000  # reading pixels takes one for each pixel or run of pixels, at most
MAX_COMMENTS = 1000  # of a plain PPM: each takes a copy of a megabyte
MAX_CHUNKS, MAX_DATA_CHUNKS = 500, 100_000  # of a PNG: of other kinds, each up to a megabyte unpacked, and of pixels
MAX_NUMBERS = 200_000  # in a tag of a TIFF: each strip takes an object; a color map of 16 bits has 3 × 65,536
MAX_MARKERS = 400  # of a JPEG before its first scan, with 64 KB each; Pillow reads four times for each

SEQUENTIAL, FRAMES, SCAN = (0xC0, 0xC1), (0xC0, 0xC1, 0xC2), 0xDA  # markers of a JPEG; frames with Huffman coding
FRAME = struct.Struct(">BHHB")  # bits, height, width and channels
SEGMENTS = frozenset((0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE))  # tables, metadata and comments of a JPEG
SCAN_HEADER = b"\xff\xda\0"  # a scan's marker, and its length, below 256; entropy-coded data cannot contain it
PNG, CHUNK, PIXEL_CHUNKS = b"\x89PNG\r\n\x1a\n", struct.Struct(">I4s"), (b"IDAT", b"fdAT")
BYTE_TYPES = (1, 2, 7)  # of TIFF tags that are kept as they are


class Frame(NamedTuple):
    """What a JPEG says of itself before its first scan."""

    marker: int
    bits: int
    height: int
    width: int
    channels: int
    scan_channels: int  # of the first scan


class CountedFile(io.BytesIO):
    """A file in memory that can be read ``left`` times: Pillow reads each marker, chunk, tag and run of pixels alone.

    Only a count of what the reader itself does cannot be evaded by a file that two parsers understand differently.
    """

    left = MAX_HEADER_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise DecodeError("it consists of too many parts")
        return io.BytesIO.read(self, size)


def check_cost(data: bytes, width: int, height: int) -> None:
    """Raise DecodeError if an image of this size takes too much memory or time, however small its file is."""
    pixels = width * height
    if not 0 < pixels <= MAX_PIXELS:
        raise DecodeError(f"{width} × {height} pixels; expected at least 1 and at most {MAX_PIXELS:,}")
    if data.startswith(b"\xff\xd8") and not _has_one_scan(data):
        scans = data.count(SCAN_HEADER)  # wherever they are: no parser of ours decides which of them libjpeg sees
        if scans * pixels > MAX_SCANNED:
            raise DecodeError(
                f"{scans:,} scans of {width} × {height} pixels; expected at most {MAX_SCANNED // pixels:,}"
            )


def check_parts(data: bytes) -> None:
    """Raise DecodeError if a PNG has too many chunks, or a TIFF too many strips, for Pillow to even open it."""
    if data.startswith(PNG):
        _check_chunks(data)
    elif data[:2] in (b"II", b"MM"):
        try:
            _check_tags(data)
        except struct.error as error:
            raise DecodeError("the directory of the TIFF is cut") from error


def check_decoder(image: ImageFile.ImageFile, data: bytes) -> None:
    """Raise DecodeError if Pillow would decode a large image by a loop in Python."""
    kind = image.tile[0][0] if image.tile else ""
    if kind in Image.DECODERS and image.width * image.height > MAX_SLOW_PIXELS:
        raise DecodeError(
            f"{image.width} × {image.height} pixels of a kind that is decoded slowly (run-length BMP, plain PPM, or "
            f"PPM with a maximum other than 255); expected at most {MAX_SLOW_PIXELS:,}"
        )
    if kind == "ppm_plain" and data.count(b"#") > MAX_COMMENTS:
        raise DecodeError(f"a plain PPM with more than {MAX_COMMENTS:,} comments")


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of a common JPEG: whole, with 8 bits of gray or RGB; None for anything else."""
    if not data.startswith(b"\xff\xd8") or not data.endswith(b"\xff\xd9"):
        return None
    frame = _read_frame(data)
    common = frame and frame.bits == 8 and frame.channels in (1, 3) and frame.width and frame.height
    return (frame.width, frame.height) if frame and common else None


def _has_one_scan(data: bytes) -> bool:
    """Whether libjpeg decodes one scan at most: the first of a sequential JPEG has all channels."""
    frame = _read_frame(data)
    return frame is not None and frame.marker in SEQUENTIAL and frame.scan_channels == frame.channels


def _read_frame(data: bytes) -> Frame | None:
    """The frame of a JPEG; None if there is anything before its first scan that parsers may understand differently."""
    offset, frame = 2, 0
    with suppress(IndexError, struct.error):  # of a file that ends too early
        for _ in range(MAX_MARKERS):
            if data[offset] != 0xFF:
                return None
            marker = data[offset + 1]
            if marker == 0xFF:  # padding
                offset += 1
                continue
            if marker == SCAN and frame:
                bits, height, width, channels = FRAME.unpack_from(data, frame + 4)
                return Frame(data[frame + 1], bits, height, width, channels, data[offset + 4])
            if marker in FRAMES and not frame:
                frame = offset
            elif marker not in SEGMENTS:
                return None
            length = data[offset + 2] << 8 | data[offset + 3]
            if length < 2:
                return None
            offset += 2 + length
        raise DecodeError(f"more than {MAX_MARKERS} markers before the first scan of a JPEG")
    return None


def _check_chunks(data: bytes) -> None:
    offset, others, pixels = len(PNG), 0, 0
    while offset + CHUNK.size <= len(data) and others <= MAX_CHUNKS and pixels <= MAX_DATA_CHUNKS:
        length, kind = CHUNK.unpack_from(data, offset)
        if kind in PIXEL_CHUNKS:
            pixels += 1
        else:
            others += 1
        offset += CHUNK.size + length + 4  # and the checksum
    if others > MAX_CHUNKS or pixels > MAX_DATA_CHUNKS:
        limits = f"{MAX_DATA_CHUNKS:,} with pixels and {MAX_CHUNKS} others"
        raise DecodeError(f"more chunks in a PNG than expected: at most {limits}")


def _check_tags(data: bytes) -> None:
    """Check the number of values of each tag in the first directory, which alone is read."""
    order, big = "<" if data.startswith(b"II") else ">", 43 in data[2:4]
    (start,) = struct.unpack_from(order + ("Q" if big else "I"), data, 8 if big else 4)
    count, entry = order + ("Q" if big else "H"), struct.Struct(order + ("HHQ8x" if big else "HHI4x"))
    (tags,) = struct.unpack_from(count, data, start)
    for tag in range(min(tags, MAX_HEADER_READS)):  # Pillow reads no more
        number, kind, values = entry.unpack_from(data, start + struct.calcsize(count) + tag * entry.size)
        if kind not in BYTE_TYPES and values > MAX_NUMBERS:
            raise DecodeError(f"tag {number} of the TIFF has {values:,} values; expected at most {MAX_NUMBERS:,}")
