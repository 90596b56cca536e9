"""Every way in which a file of a checkpoint can come to harm."""

import numpy as np


def damage_cases(folder, flips=4):
    """Yield (file, new content or None for deleted), for all files below a folder."""
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        data = path.read_bytes()
        yield path, None
        if not data:
            continue
        yield path, data[:-1]
        yield path, data[: len(data) // 2]
        yield path, b""
        yield path, data + b"\0"
        num_flips = 60 if path.name == "manifest.json" else flips
        for place in np.linspace(0, len(data) - 1, num_flips, dtype=int):
            flipped = bytearray(data)
            flipped[place] ^= 1 << (place % 8)
            yield path, bytes(flipped)


def put(path, data):
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
