"""Writes the pictures in pictures/ and what the image and video processors of transformers make of them.

Run with transformers 5.24, torchvision 0.26 and Pillow 13: python3 make_pictures.py
golden.safetensors holds, for each picture, the levels (0 to 255) of its patches [patches, 3, 4, 4] and its grid; for
films [patches, 3, 2, 4, 4]; and one picture's pixel_values as they are, in fp32, with another mean and deviation.
sizes.json holds what smart_resize gives for pictures and films of many sizes, at the published settings.
"""

import json
import random
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFile, ImageOps
from safetensors.torch import save_file
from transformers.models.qwen2_vl import image_processing_qwen2_vl
from transformers.models.qwen3_vl import video_processing_qwen3_vl

FOLDER = Path(__file__).parent / "pictures"
HALF = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3)
CLIP = dict(image_mean=[0.48145466, 0.4578275, 0.40821073], image_std=[0.26862954, 0.26130258, 0.27577711])
PATCHES = dict(patch_size=4, temporal_patch_size=2, merge_size=2)
IMAGE_AREA = dict(size={"shortest_edge": 512, "longest_edge": 1024})
VIDEO_AREA = dict(size={"shortest_edge": 512, "longest_edge": 2048})
ImageFile.MAXBLOCK = 1 << 20
random_numbers = np.random.default_rng(5)


def picture(height, width, channels=3, top=255):
    """Gradients, hard edges and noise side by side."""
    y, x = np.mgrid[0:height, 0:width]
    planes = [x * top // max(width - 1, 1), y * top // max(height - 1, 1), (x + y) * top // (height + width), y * top // height]
    values = np.stack(planes[:channels], -1)
    values[height // 4 : height // 2, width // 5 : width // 2] = np.array([top, top // 8, 0, top // 2])[:channels]
    noisy = values[height // 2 :, width // 2 :]
    noisy[:] = random_numbers.integers(0, top + 1, noisy.shape)
    return values


def write_png(name, values, bits, colour, interlaced=False):
    """A PNG of a kind that Pillow does not write. `values` is [height, width, channels]."""
    height, width, _ = values.shape

    def rows(part):
        if bits >= 8:
            part = part.astype(">u2" if bits == 16 else "u1")
            return b"".join(b"\0" + row.tobytes() for row in part)
        digits = ["".join(format(int(v), f"0{bits}b") for v in row.reshape(-1)) for row in part]
        digits = [line + "0" * (-len(line) % 8) for line in digits]
        return b"".join(b"\0" + int(line, 2).to_bytes(len(line) // 8, "big") for line in digits)

    passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
    parts = [values[y::dy, x::dx] for y, x, dy, dx in passes] if interlaced else [values]
    data = b"".join(rows(part) for part in parts if part.size)

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, int(interlaced))
    whole = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data, 9)) + chunk(b"IEND", b"")
    (FOLDER / name).write_bytes(whole)


def exif(orientation):
    data = Image.Exif()
    data[0x0112] = orientation
    return data.tobytes()


def write_pictures():
    def image(height, width, channels=3):
        values = picture(height, width, channels).astype(np.uint8)
        return Image.fromarray(values[..., 0] if channels == 1 else values)

    def save(picture, name, **options):
        picture.save(FOLDER / name, **options)

    save(image(20, 30), "grown.png")
    save(image(61, 43), "shrunk.png")
    save(image(24, 32), "kept.png")
    save(image(90, 7), "narrow.png")
    save(image(1, 1), "dot.png")
    save(image(37, 53, 4), "alpha.png")
    save(image(37, 53, 2), "grey_alpha.png")
    save(image(37, 53, 1), "grey.png")
    save(image(37, 53, 1).convert("1"), "one_bit.png")
    palette = image(37, 53).quantize(13, dither=Image.Dither.NONE)
    save(palette, "palette.png", bits=4)
    save(palette, "palette_alpha.png", transparency=bytes(range(0, 255, 20)))
    # The corner of the noise and a run of grey, made invisible.
    save(image(37, 53, 1), "grey_key.png", transparency=31)
    save(image(37, 53), "colour_key.png", transparency=(255, 31, 0))
    write_png("grey_2_bits.png", picture(37, 53, 1, 3), 2, 0)
    write_png("grey_4_bits.png", picture(37, 53, 1, 15), 4, 0)
    write_png("deep.png", picture(21, 27, 3, 65535), 16, 2)
    write_png("interlaced.png", picture(37, 53, 3), 8, 2, interlaced=True)
    save(image(30, 20), "turned.png", exif=exif(6))

    for name, subsampling in [("444", 0), ("422", 1), ("420", 2)]:
        save(image(37, 53), f"{name}.jpg", quality=85, subsampling=subsampling)
        save(image(45, 31), f"{name}_progressive.jpg", quality=60, subsampling=subsampling, progressive=True)
    save(image(45, 31), "coarse.jpg", quality=20)
    save(image(45, 31), "restarts.jpg", quality=75, restart_marker_blocks=2)
    save(image(45, 31, 1), "grey.jpg", quality=75)
    save(image(45, 31).convert("CMYK"), "inks.jpg", quality=90)
    turned = image(20, 33)
    for orientation in range(1, 9):
        save(turned, f"exif_{orientation}.jpg", quality=90, exif=exif(orientation))

    save(image(37, 53), "lossy.webp", quality=70)
    save(image(37, 53), "lossless.webp", lossless=True)
    save(image(37, 53, 4), "alpha.webp", quality=70)
    save(image(30, 20), "turned.webp", quality=80, exif=exif(8))
    for frame in range(3):
        save(image(24, 40), f"frame_{frame}.png")
        save(image(6, 9), f"small_{frame}.png")


def opened(name):
    return ImageOps.exif_transpose(Image.open(FOLDER / name))


def levels(pixel_values):
    found = pixel_values.double() * 127.5 + 127.5
    assert (found - found.round()).abs().max() < 1e-4
    return found.round().to(torch.uint8)


def write_goldens():
    tensors = {}
    image_processor = image_processing_qwen2_vl.Qwen2VLImageProcessor(**PATCHES, **IMAGE_AREA, **HALF)
    names = sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".png", ".jpg", ".webp"))
    names = [name for name in names if not name.startswith(("frame_", "small_"))]
    for name in names:
        made = image_processor(opened(name), return_tensors="pt")
        patches = levels(made["pixel_values"]).view(-1, 3, 2, 4, 4)
        assert (patches[:, :, 0] == patches[:, :, 1]).all()
        tensors[name] = patches[:, :, 0].contiguous()
        tensors[f"{name}.grid"] = made["image_grid_thw"][0]
    other = image_processing_qwen2_vl.Qwen2VLImageProcessor(**PATCHES, **IMAGE_AREA, **CLIP)
    tensors["grown.png.clip"] = other(opened("grown.png"), return_tensors="pt")["pixel_values"]

    video_processor = video_processing_qwen3_vl.Qwen3VLVideoProcessor(**PATCHES, **VIDEO_AREA, **HALF)
    for name, frames in [("frame_", 3), ("frame_", 2), ("small_", 3)]:
        film = [np.array(opened(f"{name}{frame}.png")) for frame in range(frames)]
        film = torch.from_numpy(np.stack(film)).permute(0, 3, 1, 2)
        made = video_processor([film], do_sample_frames=False, cap_pixels_per_frame=False, return_tensors="pt")
        tensors[f"{name}{frames}"] = levels(made["pixel_values_videos"]).view(-1, 3, 2, 4, 4)
        tensors[f"{name}{frames}.grid"] = made["video_grid_thw"][0]
    save_file(tensors, FOLDER / "golden.safetensors")


def write_sizes():
    random.seed(3)
    side = lambda: int(2 ** random.uniform(0, 12.5))
    pairs = [(side(), side()) for _ in range(150)] + [(16, 48), (80, 112), (1, 200), (200, 1), (32, 32), (4096, 4097)]
    pairs = [pair for pair in pairs if max(pair) <= 200 * min(pair)]
    images = [
        [*pair, *image_processing_qwen2_vl.smart_resize(*pair, 32, 65536, 16777216)] for pair in pairs
    ]
    films = []
    for pair in pairs:
        frames = random.randint(2, 40)
        try:
            size = video_processing_qwen3_vl.smart_resize(frames, *pair, 2, 32, 4096, 25165824)
        except ValueError:
            continue
        films.append([frames, *pair, *size])
    (FOLDER / "sizes.json").write_text(json.dumps({"images": images, "films": films}) + "\n")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    write_pictures()
    write_goldens()
    write_sizes()
