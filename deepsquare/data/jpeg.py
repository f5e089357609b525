"""The size of a JPEG from its header, without a decoder."""

import struct

FRAME_MARKERS = (0xC0, 0xC1, 0xC2)  # baseline, extended and progressive, with Huffman coding
STANDALONE_MARKERS = (0x01, *range(0xD0, 0xD8))  # markers without a length


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of a common JPEG: whole, with 8 bits of gray or RGB; None for anything else."""
    if not data.startswith(b"\xff\xd8") or not data.endswith(b"\xff\xd9"):
        return None
    offset = 2
    while offset + 10 <= len(data) and data[offset] == 0xFF:
        marker, length = data[offset + 1], int.from_bytes(data[offset + 2 : offset + 4], "big")
        if marker in FRAME_MARKERS:
            bits, height, width, channels = struct.unpack_from(">BHHB", data, offset + 4)
            common = bits == 8 and channels in (1, 3) and width and height
            return (width, height) if common else None
        if marker == 0xFF:  # padding
            offset += 1
        elif marker in STANDALONE_MARKERS:
            offset += 2
        else:
            offset += 2 + length
    return None
