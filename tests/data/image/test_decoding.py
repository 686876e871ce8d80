"""One image is decoded to one size as Pillow does it, by either decoder, whatever its shape, colours and orientation."""

import io
import struct
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.image.pictures import encode, natural
from tests.extras import require

import penstock as ps
from penstock.data.image import decoding
from penstock.data.image.decoding import jpeg_orientation, place, random_box, upright

Image = require("PIL.Image")
ImageOps = require("PIL.ImageOps")

DECODERS = ["auto", "pil"]
SHAPES = [(375, 500), (500, 375), (480, 640), (224, 224), (333, 1000), (1200, 900), (90, 70), (1501, 1126), (300, 3000)]
FITS = ["crop", "stretch", "pad"]
PAIRS = [  # each shape with each size, each fit and each decoder, and each two of these
    (shape, size, FITS[(i + j) % 3], DECODERS[(i + j + i // 3) % 2])
    for i, shape in enumerate(SHAPES)
    for j, size in enumerate([(224, 224), (160, 224), (97, 64)])
]


@cache
def photo(shape):
    return encode(natural(*shape))


def reference(data, size, fit):
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    height, width = size
    if fit == "stretch":
        return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
    if fit == "crop":
        return np.asarray(ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR))
    inner = place((image.height, image.width), size, "pad")[1]
    canvas = np.zeros((height, width, 3), np.uint8)
    resized = image.resize((inner.width, inner.height), Image.Resampling.BILINEAR)
    canvas[inner.top : inner.top + inner.height, inner.left : inner.left + inner.width] = resized
    return canvas


def difference(a, b):
    assert a.shape == b.shape
    return np.abs(a.astype(int) - b.astype(int)).mean()


def test_the_fast_libraries_are_there():
    require("simplejpeg")
    require("cv2")
    assert decoding._fast_libraries() is not None  # else the tests of "auto" show nothing


@pytest.mark.parametrize(("shape", "size", "fit", "decoder"), PAIRS)
def test_an_image_of_any_shape_is_as_pillow_resizes_it(shape, size, fit, decoder):
    data = photo(shape)
    got = ps.decode_image(data, size, fit=fit, decoder=decoder)
    assert got.dtype == np.uint8
    assert difference(got, reference(data, size, fit)) < 2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_decoders_give_the_same_picture(shape):
    data = photo(shape)
    assert difference(ps.decode_image(data, 224), ps.decode_image(data, 224, decoder="pil")) < 1.5


@pytest.mark.parametrize("decoder", DECODERS)
def test_fine_stripes_do_not_alias(decoder):
    stripes = np.zeros((600, 600, 3), np.uint8)
    stripes[:, ::2] = 255
    got = ps.decode_image(encode(stripes, subsampling=0), 350, decoder=decoder)
    assert got[10:-10, 10:-10].std() < 45  # plain bilinear interpolation has 90


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_of_a_camera_is_applied(orientation, fit):
    decoder = DECODERS[(orientation + FITS.index(fit)) % 2]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(natural(300, 420), exif=exif)
    assert jpeg_orientation(data) == orientation
    size = (120, 100)
    assert difference(ps.decode_image(data, size, fit=fit, decoder=decoder), reference(data, size, fit)) < 2


@pytest.mark.parametrize("orientation", range(1, 9))
def test_upright_is_what_pillow_does(orientation):
    pixels, exif = natural(6, 9), Image.Exif()
    exif[0x0112] = orientation
    png = encode(pixels, "PNG", exif=exif)
    assert np.array_equal(upright(pixels, orientation), np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(png)))))
    assert np.array_equal(ps.decode_image(png, upright(pixels, orientation).shape[:2]), upright(pixels, orientation))


@given(st.binary(max_size=80))
def test_no_exif_segment_whatever_it_holds_is_an_error(content):
    segment = b"Exif\0\0" + content
    data = b"\xff\xd8\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment + b"\xff\xda"
    assert jpeg_orientation(data) in range(1, 9)
    assert jpeg_orientation(data[:20]) in range(1, 9)


@pytest.mark.parametrize(
    ("format", "mode", "options"),
    [
        ("JPEG", "L", {}),
        ("JPEG", "CMYK", {}),
        ("JPEG", "RGB", {"progressive": True}),
        ("JPEG", "RGB", {"subsampling": 0}),
        ("JPEG", "RGB", {"keep_rgb": True}),
        ("PNG", "RGB", {}),
        ("PNG", "L", {}),
        ("PNG", "P", {}),
        ("PNG", "1", {}),
        ("WEBP", "RGB", {}),
        ("GIF", "P", {}),
        ("BMP", "RGB", {}),
        ("TIFF", "RGB", {}),
    ],
)
def test_every_format_and_colour_mode_becomes_rgb(format, mode, options):
    data = encode(natural(200, 260), format, mode, **options)
    for decoder in DECODERS if format == "JPEG" else ["auto"]:
        got = ps.decode_image(data, (80, 104), decoder=decoder)
        assert difference(got, reference(data, (80, 104), "stretch")) < 2


def test_transparent_pixels_are_blended_over_white():
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[:2] = [255, 0, 0, 255]
    data = encode(Image.fromarray(pixels), "PNG", "RGBA")
    assert ps.decode_image(data, 4)[:, 0].tolist() == [[255, 0, 0]] * 2 + [[255, 255, 255]] * 2
    palette = Image.fromarray(pixels).convert("P")
    data = encode(palette, "PNG", "P", transparency=palette.getpixel((0, 3)))
    assert ps.decode_image(data, 4)[3, 0].tolist() == [255, 255, 255]


def test_sixteen_bits_a_pixel_keep_their_upper_eight():
    data = encode(Image.fromarray(np.full((4, 4), 0x7FFF, np.uint16)), "PNG", "I;16")
    assert ps.decode_image(data, 4)[0, 0].tolist() == [0x7F] * 3


def tiff(pixels, bits, kind=1, white_is_zero=False):
    """Return a TIFF file of one channel, with pixels as they are given."""
    data = pixels.tobytes() if isinstance(pixels, np.ndarray) else pixels
    tags = {256: 2, 257: 2, 258: bits, 259: 1, 262: 0 if white_is_zero else 1, 273: 8, 277: 1, 278: 2, 279: len(data), 339: kind}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return struct.pack("<2sHI", b"II", 42, 8 + len(data)) + data + struct.pack("<H", len(tags)) + entries + bytes(4)


_U16 = np.array([0, 0x7FFF, 0xFFFF, 0x100], "<u2")
_U12 = bytes([0x00, 0x07, 0xFF, 0xFF, 0xF0, 0x10])


@pytest.mark.parametrize(("pixels", "bits", "white_is_zero"), [(_U16, 16, False), (_U16, 16, True), (_U12, 12, False)])
def test_more_than_eight_bits_of_a_tiff_keep_their_upper_eight(pixels, bits, white_is_zero):
    wanted = np.array([[0, 0x7F], [0xFF, 1]])
    got = ps.decode_image(tiff(pixels, bits, white_is_zero=white_is_zero), 2)[..., 0]
    assert got.tolist() == (255 - wanted if white_is_zero else wanted).tolist()


@pytest.mark.parametrize(
    ("dtype", "kind", "message"),
    [
        ("u4", 1, "integers of 32 bits"),
        ("i4", 2, "signed integers"),
        ("i2", 2, "signed integers"),
        ("i1", 2, "signed integers"),
        ("f4", 3, "floating-point numbers"),
    ],
)
def test_pixels_without_a_fixed_scale_are_refused(dtype, kind, message):
    data = tiff(np.arange(4, dtype=dtype), 8 * np.dtype(dtype).itemsize, kind)
    with pytest.raises(ValueError, match=rf"8 bits a colour: .*{message}, .*size=None") as caught:
        ps.decode_image(data, 2)
    assert "cut short" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "remedy"),
    [
        ("x.jpg", r"a str: .*pathlib.Path\('x.jpg'\).read_bytes"),
        (Path("x.jpg"), r"pathlib.Path\('x.jpg'\).read_bytes"),
        (np.zeros((4, 4, 3), np.uint8), "a ndarray: .*pixels are decoded already"),
        (Image.new("RGB", (3, 3)), "an? Image: .*pixels are decoded already"),
        (io.BytesIO(), r"a BytesIO: .*read\(\)"),
        (None, "a NoneType: .*needs the contents"),
    ],
    ids=["path as text", "path", "pixels", "image", "stream", "nothing"],
)
def test_only_bytes_are_decoded(data, remedy):
    with pytest.raises(TypeError, match=remedy):
        ps.decode_image(data, 8)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_may_be_of_any_kind(kind):
    data = encode(natural(20, 30))
    assert np.array_equal(ps.decode_image(kind(data), 8), ps.decode_image(data, 8))


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_single_pixel_and_extreme_shapes(decoder):
    assert ps.decode_image(encode(natural(1, 1)), 8, decoder=decoder).shape == (8, 8, 3)
    for fit in ("crop", "stretch", "pad"):
        assert ps.decode_image(encode(natural(3, 900)), (20, 5), fit=fit, decoder=decoder).shape == (20, 5, 3)
        assert ps.decode_image(encode(natural(900, 3)), 1, fit=fit, decoder=decoder).shape == (1, 1, 3)


@settings(max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    size=st.tuples(st.integers(1, 120), st.integers(1, 120)),
    fit=st.sampled_from(["crop", "stretch", "pad"]),
    orientation=st.integers(1, 8),
)
def test_a_uniform_image_stays_uniform_at_any_size(shape, size, fit, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(np.full((*shape, 3), 128, np.uint8), exif=exif)
    for decoder in DECODERS:
        got = ps.decode_image(data, size, fit=fit, decoder=decoder)
        if fit != "pad":
            assert np.abs(got.astype(int) - 128).max() <= 2
        assert set(np.unique(got // 64)) <= {0, 1, 2}
        assert abs(int(got.max()) - 128) <= 2


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_random_part_depends_on_the_generator_alone(decoder):
    data = encode(natural(375, 500))
    one, same, other = (ps.decode_image(data, 64, rng=np.random.default_rng(s), decoder=decoder) for s in (1, 1, 2))
    assert np.array_equal(one, same)
    assert difference(one, other) > 2
    assert difference(one, ps.decode_image(data, 64, rng=np.random.default_rng(1), decoder="pil")) < 2.5
    whole = ps.decode_image(data, 64, rng=np.random.default_rng(1), area=(1, 1), decoder=decoder)
    assert difference(whole, ps.decode_image(data, 64, fit="stretch", decoder=decoder)) < 1


@given(
    image=st.tuples(st.integers(1, 3000), st.integers(1, 3000)),
    area=st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)),
    seed=st.integers(0, 100),
)
def test_a_random_box_lies_inside_of_the_image(image, area, seed):
    box = random_box(image, np.random.default_rng(seed), (min(area), max(area)))
    assert 0 <= box.top <= box.top + box.height <= image[0]
    assert 0 <= box.left <= box.left + box.width <= image[1]
    assert box.height > 0
    assert box.width > 0


@pytest.mark.parametrize(
    ("damage", "decoder"),
    [
        (lambda b: b[: len(b) // 2], "auto"),
        (lambda b: b[: len(b) // 2], "pil"),
        (lambda b: b[:-2], "auto"),
        (lambda b: b[:30], "auto"),
        (lambda b: b"", "pil"),
        (lambda b: b"no image" * 50, "auto"),
    ],
    ids=["half", "half, by Pillow", "nearly all", "header", "empty", "text"],
)
def test_damaged_bytes_are_refused_by_both_decoders(damage, decoder):
    data = damage(encode(natural(100, 120)))
    with pytest.raises(ValueError, match=rf"data \({len(data):,} bytes\) is not a complete image: .*Copy it again"):
        ps.decode_image(data, 32, decoder=decoder)


@settings(max_examples=50)
@given(at=st.integers(0, 5000), value=st.integers(0, 255), format=st.sampled_from(["JPEG", "PNG", "GIF", "WEBP"]))
@pytest.mark.filterwarnings("ignore")
def test_any_changed_byte_gives_an_image_or_a_value_error(at, value, format):
    data = bytearray(encode(natural(60, 70), format))
    data[at % len(data)] = value
    with suppress(ValueError):
        assert ps.decode_image(bytes(data), 32).shape == (32, 32, 3)


def test_a_harmless_fault_is_left_to_pillow():
    data = encode(natural(100, 120))
    assert (
        difference(ps.decode_image(data[:2] + b"\xff\xfe\x00\x04hi" + data[2:] + b"trailing", 32), ps.decode_image(data, 32)) == 0
    )


def test_an_image_of_absurd_size_is_refused():
    data = bytearray(encode(natural(16, 16)))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = b"\xff\xdc\xff\xdc"  # 65,500 x 65,500
    with pytest.raises(ValueError, match=r"data .* is larger than Pillow allows, .*MAX_IMAGE_PIXELS"):
        ps.decode_image(bytes(data), 8)


def test_without_the_fast_libraries_pillow_decodes(monkeypatch):
    data = encode(natural(375, 500))
    monkeypatch.setattr(decoding, "_fast_libraries", lambda: None)
    assert np.array_equal(ps.decode_image(data, 224), ps.decode_image(data, 224, decoder="pil"))


def test_threads_do_not_disturb_each_other():
    files = [encode(natural(100 + 40 * i, 300 - 30 * i, i)) for i in range(6)]
    expected = [ps.decode_image(data, 64) for data in files]
    wrong = []

    def work(offset):
        for i in range(60):
            k = (i + offset) % len(files)
            if not np.array_equal(ps.decode_image(files[k], 64), expected[k]):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size=0: needs an integer >= 1"),
        ({"size": (8, -1)}, "size=-1"),
        ({"size": (8, 8, 3)}, "needs .height, width."),
        ({"size": 8, "fit": "cover"}, "fit='cover': choose from crop, stretch, pad"),
        ({"size": 8, "decoder": "cv2"}, "decoder='cv2': choose from auto, pil"),
        ({"size": 8, "area": (0.5, 0.1)}, "0 < least <= greatest <= 1"),
        ({"size": 8, "fit": "pad", "rng": np.random.default_rng(0)}, "fit='pad' with rng"),
    ],
)
def test_arguments_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ps.decode_image(encode(natural(8, 8)), **options)


@pytest.mark.parametrize("decoder", DECODERS)
def test_the_middle_of_a_tiny_image_stays_in_the_middle(decoder):
    pixels = np.zeros((5, 11, 3), np.uint8)
    pixels[:, 3:8] = 255
    assert ps.decode_image(encode(pixels, quality=100, subsampling=0), 1, decoder=decoder).min() > 150


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_tiff_file_is_turned_once(orientation):
    pixels = np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8)
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(file, "TIFF", exif=exif)
    wanted = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(file.getvalue()))))
    assert ps.decode_image(file.getvalue(), wanted.shape[:2]).tolist() == wanted.tolist()
