"""Store images as the model's likelihoods allow: `imagegen compress` and `imagegen decompress`.

A file is a header, little-endian, then the code of `imagegen.evaluation.coding`: "IGC" and a byte
for the format's version, the CRC-32 of all that follows it, the number of images (32 bits), the
first 8 bytes each of the SHA-256 of the checkpoint and of the images' levels, and what rounded (see
`imagegen.core.machine.rounding`), UTF-8 after its length in one byte. Format 1 had no CRC, and
neither 1 nor 2 said what rounded.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from jaxtyping import UInt8, UInt32

from imagegen.checkpoint.training_data import dataset_of
from imagegen.core import values as opt
from imagegen.core.errors import UserError
from imagegen.core.files import ensure_writable, staged_folder, write_atomic
from imagegen.core.machine import rounding
from imagegen.core.progress import image_progress
from imagegen.data.base import SPLIT_NAMES

MAGIC, FORMAT_VERSION = b"IGC", 3
PREFIX, CRC, REST = struct.Struct("<3sB"), struct.Struct("<I"), struct.Struct("<I8s8s")


def compress(config: Mapping[str, Any]) -> Path:
    """Do what `conf/compress.yaml` and the command line ask; print the size.

    Returns:
        the file written.

    Raises:
        UserError: for anything that cannot be; then nothing is written.
    """
    from imagegen.checkpoint.provenance import load_source
    from imagegen.data.image_files import read_images
    from imagegen.evaluation.coding import encode
    from imagegen.generation.images import from_display

    config = opt.plain(config)
    if config["out"] is None:
        raise UserError("out is missing; name the file to write, such as out=images.code.")
    out = opt.one_path(config["out"], "out")
    ensure_writable(out)
    limit = opt.optional_whole_number(config["limit"], "limit", 1)
    resize = opt.flag(config["resize"], "resize")
    split = opt.choice(config["split"], "split", SPLIT_NAMES)
    device = opt.resolve_device(config["device"])
    source = load_source(opt.checkpoint_path(config["ckpt"]), device)
    model = source.loaded.model
    if config["images"] is None:
        dataset = dataset_of(source.loaded.metadata, config["dataset"], model.spec)
        images = np.array(dataset.split(split).images[:limit])
    else:
        paths = opt.paths(config["images"], "images")
        images = from_display(read_images(paths, limit, resize, model.spec)[0], model.spec.levels)
    started = perf_counter()
    with image_progress("compressing", len(images)) as advance:
        words = encode(model, images, advance)
    code = words.astype("<u4").tobytes()
    place = rounding(device).encode()[:255]
    rest = REST.pack(len(images), bytes.fromhex(source.sha256)[:8], _checksum(images))
    rest += bytes([len(place)]) + place + code
    content = PREFIX.pack(MAGIC, FORMAT_VERSION) + CRC.pack(zlib.crc32(rest)) + rest
    write_atomic(out, content)
    size = len(content)
    print(
        f"{len(images)} images in {size} bytes, {8 * size / images.size:.4f} bits/dim, "
        f"in {perf_counter() - started:.1f} s: {out}"
    )
    return out


def decompress(config: Mapping[str, Any]) -> Path:
    """Do what `conf/decompress.yaml` and the command line ask; print where the images are.

    Returns:
        the folder written.

    Raises:
        UserError: for anything that cannot be, a file of another model, and images that do not come
        back as they were; then nothing is written.
    """
    from imagegen.checkpoint.provenance import load_source
    from imagegen.evaluation.coding import decode
    from imagegen.generation.images import encode_png, to_display

    config = opt.plain(config)
    for name in ("file", "out"):
        if config[name] is None:
            raise UserError(f"{name} is missing; add {name}=… (--help lists the options).")
    path, out = opt.one_path(config["file"], "file"), opt.one_path(config["out"], "out")
    n, checkpoint, images_checksum, place, words = read_code(path)
    device = opt.resolve_device(config["device"])
    source = load_source(opt.checkpoint_path(config["ckpt"]), device)
    # Before the number of images is believed, which no CRC vouches for in format 1.
    if bytes.fromhex(source.sha256)[:8] != checkpoint:
        raise UserError(
            f"{path} was compressed with another checkpoint, whose SHA-256 begins with "
            f"{checkpoint.hex()}; name that one in ckpt=."
        )
    model = source.loaded.model
    here = rounding(device)
    if place not in (None, here):
        print(
            f"{path} was written on {place}; this is {here}, which may round otherwise",
            file=sys.stderr,
        )
    with staged_folder(out, owned=[f"{index:05d}.png" for index in range(n)]) as folder:
        with image_progress("decompressing", n) as advance:
            images = decode(model, words, n, advance)
        if _checksum(images) != images_checksum:
            raise UserError(
                f"the images of {path} do not come back: it was written on "
                f"{place or 'an unknown machine'} and this is {here}, which rounds otherwise, or "
                "the file is damaged; decompress it where it was written."
            )
        for index, image in enumerate(to_display(images, model.spec.levels)):
            (folder / f"{index:05d}.png").write_bytes(encode_png(image))
    print(f"{n} images: {out}")
    return out


def read_code(path: Path) -> tuple[int, bytes, bytes, str | None, UInt32[np.ndarray, " words"]]:
    """What `compress` wrote.

    Returns:
        the number of images, checksums of checkpoint and images, what rounded (None in formats
        before 3), and the code.

    Raises:
        UserError: for a file that cannot be read, is not one of ours, is newer, or is damaged.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"file={path} cannot be read: {error.strerror or error}.") from error
    if len(content) < PREFIX.size + REST.size or not content.startswith(MAGIC):
        raise UserError(f"{path} is not a file that `imagegen compress` wrote.")
    _, version = PREFIX.unpack_from(content)
    if not version:
        raise UserError(f"{path} is damaged: it has no format 0.")
    if version > FORMAT_VERSION:
        raise UserError(
            f"{path} has format {version}, newer than the {FORMAT_VERSION} that this version "
            "reads; update imagegen."
        )
    rest = content[PREFIX.size :]
    if version > 1:
        (crc,), rest = CRC.unpack_from(rest), rest[CRC.size :]
        # Before the number of images is believed.
        if crc != zlib.crc32(rest):
            raise UserError(f"{path} is damaged: it was cut off or changed.")
    named, code = version > 2, rest[REST.size :]
    end = 1 + code[0] if named and code else 0
    if len(rest) < REST.size or len(code) < end or (len(code) - end) % 4:
        raise UserError(f"{path} is damaged: it was cut off or changed.")
    n, checkpoint, images = REST.unpack_from(rest)
    if not n:
        raise UserError(f"{path} is damaged: it holds no image.")
    place = code[1:end].decode(errors="replace") if named else None
    words = np.frombuffer(code[end:], dtype="<u4").astype(np.uint32)
    return n, checkpoint, images, place, words


def _checksum(images: UInt8[np.ndarray, "n h w c"]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(images).tobytes()).digest()[:8]
