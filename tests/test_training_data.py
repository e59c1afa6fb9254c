"""Training data: what is read and how, what is refused and how that is said, and batches."""

import csv
import io
import json
import re
import tracemalloc
from dataclasses import replace
from itertools import product

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from sd_tf.runtime.pictures import PictureError, to_model, to_rgb
from sd_tf.training import data as training_data
from sd_tf.training import rows as training_rows
from sd_tf.training import world
from sd_tf.training.batches import LatentBatches, PictureBatches, PriorBatches
from sd_tf.training.data import World, open_source
from sd_tf.training.hosts import Host
from sd_tf.training.order import shuffled
from sd_tf.training.rows import pictures_of, read_picture
from sd_tf.training.settings import TrainingError
from sd_tf.training.world.scene import HELD_OUT
from tests import micro

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def encoded(image, form="PNG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def plain(colour, **options):
    return encoded(Image.new("RGB", (12, 10), colour), **options)


def stripes(*colours):
    """Side by side, each 10 pixels wide and 10 high."""
    return Image.fromarray(np.repeat(np.array([colours], "uint8"), 10, 1).repeat(10, 0))


# Sources. A row is a file's name, the picture's bytes and the caption; None is what is missing.

ROWS = [
    ("c.png", plain(RED), "a cat, red"),
    ("a.jpg", plain(GREEN, form="JPEG", quality=100, subsampling=0), 'ein "grüner" Hund'),
    ("b.webp", plain(BLUE, form="WEBP", lossless=True), "青い鳥"),
]
FOLDERS, PARQUETS = ("metadata.jsonl", "metadata.csv", "txt"), ("bytes", "struct")
LAYOUTS = FOLDERS + PARQUETS


def write_parquet(
    path, rows, layout="bytes", caption_column="text", image_column="image", row_group_size=None
):
    pictures = [picture for _, picture, _ in rows]
    if layout == "struct":
        pictures = [{"bytes": picture, "path": name} for name, picture, _ in rows]
    captions = pyarrow.array([caption for _, _, caption in rows], pyarrow.string())
    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(
        pyarrow.table(
            {"id": list(range(len(rows))), image_column: pictures, caption_column: captions}
        ),
        path,
        row_group_size=row_group_size,
    )


def write(
    folder,
    layout,
    rows,
    encoding="utf-8",
    columns=("file_name", "text"),
    row_group_size=None,
):
    if layout in PARQUETS:
        write_parquet(folder / "rows.parquet", rows, layout, row_group_size=row_group_size)
        return
    for name, picture, caption in rows:
        if picture is not None:
            (folder / name).write_bytes(picture)
        if layout == "txt" and caption is not None:
            (folder / name).with_suffix(".txt").write_text(caption + "\n", encoding)
    if layout == "txt":
        return
    table = [dict(zip(columns, (name, caption), strict=True)) for name, _, caption in rows]
    with (folder / layout).open("w", encoding=encoding, newline="") as file:
        if layout == "metadata.csv":
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(table)
        else:
            file.writelines(json.dumps(row) + "\n" for row in table)


def check_read(source, rows):
    assert len(source) == len(rows)
    for index, (_, picture, caption) in enumerate(rows):
        assert source.caption(index, epoch=0) == source.caption(index, epoch=3) == caption
        pixels = source.picture(index)
        assert pixels.shape == (8, 8, 3)
        assert pixels.dtype == np.uint8
        expected = np.array(Image.open(io.BytesIO(picture)).convert("RGB"))[0, 0]
        np.testing.assert_array_equal(pixels, np.broadcast_to(expected, (8, 8, 3)))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read(tmp_path, layout, encoding):
    """Tables in their order, pictures with captions beside them by name."""
    write(tmp_path, layout, ROWS, encoding)
    source = open_source(tmp_path, 8)
    check_read(source, sorted(ROWS) if layout == "txt" else ROWS)
    assert source.skipped == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pictures_without_captions(tmp_path, layout):
    data, checked = tmp_path / "data", tmp_path / "bad_rows.json"
    data.mkdir()
    rows = [(name, picture, None) for name, picture, _ in sorted(ROWS)]
    write(data, layout, rows)
    with pytest.raises(TrainingError, match=r"the caption is empty|there is no \w+\.txt"):
        open_source(data, 8)
    for _ in range(2):
        source = open_source(data, 8, checked=checked, caption_column=None)
        assert len(source) == 3
        for index, (_, picture, _) in enumerate(rows):
            expected = read_picture(picture, 8)
            np.testing.assert_array_equal(source.picture(index), expected)


@pytest.mark.parametrize("layout", FOLDERS[:2])
def test_columns_of_a_table_can_be_named(tmp_path, layout):
    write(tmp_path, layout, ROWS, columns=("picture", "title"))
    check_read(open_source(tmp_path, 8, caption_column="title", image_column="picture"), ROWS)


def test_parquet_in_several_files(tmp_path):
    columns = {"caption_column": "title", "image_column": "picture"}
    write_parquet(tmp_path / "part-1.parquet", ROWS[1:2], "struct", **columns)
    write_parquet(tmp_path / "part-0.parquet", ROWS[:1], "bytes", **columns)
    write_parquet(tmp_path / "validation" / "0.parquet", ROWS[2:], "bytes", **columns)
    check_read(open_source(tmp_path, 8, **columns), ROWS)
    check_read(open_source(tmp_path / "part-1.parquet", 8, **columns), ROWS[1:2])


def test_parquet_is_read_by_row_group(tmp_path):
    """So that no more pictures than those of a few groups are in memory."""
    noise = np.random.default_rng(0).integers(0, 256, (40, 300, 300, 3), "uint8")
    rows = [(f"{n}.png", encoded(Image.fromarray(noise[n])), f"number {n}") for n in range(40)]
    size = sum(len(picture) for _, picture, _ in rows)
    write_parquet(tmp_path / "rows.parquet", rows, "struct", row_group_size=1)
    expected = [read_picture(picture, 300) for _, picture, _ in rows]
    del rows
    pyarrow.default_memory_pool().release_unused()
    before = pyarrow.total_allocated_bytes()
    tracemalloc.start()
    try:
        source = open_source(tmp_path, 300)
        for index in range(40):
            np.testing.assert_array_equal(source.picture(index), expected[index])
            assert source.caption(index, 0) == f"number {index}"
            assert pyarrow.total_allocated_bytes() - before < size / 4
        assert tracemalloc.get_traced_memory()[1] < size / 2
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(source.picture(5), expected[5])


def test_an_epoch_reads_a_row_group_once(tmp_path, monkeypatch):
    rows = [(f"{n}.png", PICTURE, f"number {n}") for n in range(40)]
    write_parquet(tmp_path / "rows.parquet", rows, row_group_size=2)
    read = []
    monkeypatch.setattr(
        training_data, "pictures_of", lambda *group: read.append(group) or pictures_of(*group)
    )
    source = open_source(tmp_path, 8)
    epochs = [[source.order(40 * epoch + i, 7) for i in range(40)] for epoch in range(2)]
    for epoch, order in enumerate(epochs):
        assert sorted(order) == [(i, epoch) for i in range(40)]
    for index, _ in epochs[0]:
        source.picture(index)
    assert len(read) == len(set(read)) == 20


@pytest.mark.parametrize("layout", ["txt", "struct"])
def test_pictures_are_checked_once(tmp_path, layout, monkeypatch):
    """The next start knows the bad rows, as long as the data is the same."""
    rows = [(f"{n}.png", PICTURE[: 500 if n == 2 else None], f"number {n}") for n in range(5)]
    data, checked = tmp_path / "data", tmp_path / "run" / "bad_rows.json"
    data.mkdir()
    write(data, layout, rows, row_group_size=2)
    with pytest.raises(TrainingError, match="the picture is damaged"):
        open_source(data, 8, checked=checked)
    assert not checked.exists()
    first = open_source(data, 8, "skip", checked=checked)
    read = []
    monkeypatch.setattr(training_rows, "read_picture", lambda picture, size: read.append(picture))
    again = open_source(data, 8, "skip", checked=checked)
    assert again.rows == first.rows and again.skipped == first.skipped
    with pytest.raises(TrainingError, match=r"the picture is damaged .* set `on_error` to skip"):
        open_source(data, 8, checked=checked)
    assert read == [] and len(again) == 4
    write(data, layout, [*rows, ("5.png", PICTURE, "number 5")])
    open_source(data, 8, "skip", checked=checked)
    assert read


@pytest.mark.parametrize("layout", ["txt", "bytes"])
def test_each_host_has_its_part(tmp_path, layout):
    rows = [(f"{n}.png", PICTURE, f"number {n}") for n in range(7)]
    write(tmp_path, layout, rows, row_group_size=2)
    parts = [open_source(tmp_path, 8, host=Host(number, 3)) for number in range(3)]
    captions = [[part.caption(i, 0) for i in range(len(part))] for part in parts]
    numbers = {"txt": [[0, 3, 6], [1, 4], [2, 5]], "bytes": [[0, 1, 6], [2, 3], [4, 5]]}[layout]
    assert captions == [[f"number {n}" for n in part] for part in numbers]
    whole = open_source(tmp_path, 8)
    assert all(part.record() == whole.record() for part in parts)
    with pytest.raises(TrainingError, match=r"no usable example for host 8 of 9\. Skipped: 0\."):
        open_source(tmp_path, 8, host=Host(8, 9))


def test_each_host_has_its_part_of_the_world():
    whole, parts = World(7, 16, seed=2), [World(7, 16, seed=2, host=Host(n, 3)) for n in range(3)]
    for number, part in enumerate(parts):
        assert len(part) == len(range(number, 7, 3)) and part.record() == whole.record()
        for index in range(len(part)):
            theirs = number + 3 * index
            np.testing.assert_array_equal(part.picture(index), whole.picture(theirs))
            assert part.caption(index, 4) == whole.caption(theirs, 4)


@pytest.mark.parametrize(
    ("layout", "change", "differing"),
    [
        ("txt", lambda f: (f / "a.jpg").rename(f / "aa.jpg"), {"names"}),
        ("txt", lambda f: (f / "b.txt").write_text("a bird"), {"captions"}),
        ("txt", lambda f: (f / "a.jpg").write_bytes(PICTURE), {"sizes"}),
        ("txt", lambda f: (f / "a.jpg").unlink(), {"rows", "files", "names", "sizes", "captions"}),
        (
            "metadata.csv",
            lambda f: write(f, "metadata.csv", ROWS[::-1]),
            {"names", "sizes", "captions"},
        ),
        ("bytes", lambda f: (f / "rows.parquet").rename(f / "more.parquet"), {"names"}),
        (
            "bytes",
            lambda f: write_parquet(f / "rows.parquet", ROWS, row_group_size=1),
            {"sizes", "groups"},
        ),
    ],
)
def test_a_record_tells_data_apart(tmp_path, layout, change, differing):
    """A copy elsewhere is the same data; other names, sizes, captions, order or number are not."""
    folders = tmp_path / "one", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
        write(folder, layout, ROWS)
    one, other = (open_source(folder, 8).record() for folder in folders)
    assert one == other != open_source(folders[1], 16).record()
    change(folders[1])
    if layout == "txt":
        (folders[1] / "aa.txt").write_text('ein "grüner" Hund\n', "utf-8")
    changed = open_source(folders[1], 8).record()
    assert {name for name in one if one[name] != changed[name]} == differing


# Bad rows

PICTURE = encoded(Image.effect_noise((32, 32), 90))
DAMAGED_EXIF = plain(RED, form="WEBP", exif=b"Exif\0\0no orientation here")
PROBLEMS = {
    "cut off": (PICTURE[: len(PICTURE) // 2], "a dog", r"the picture is damaged \(.*truncated.*\)"),
    "damaged Exif": (DAMAGED_EXIF, "a dog", r"the picture is damaged \(not a TIFF file.*\)"),
    "text": (b"a dog", "a dog", "this is not a PNG, JPEG, WebP or AVIF picture"),
    "nothing": (b"", "a dog", "this is not a PNG, JPEG, WebP or AVIF picture"),
    "blank caption": (PICTURE, " \n", "the caption is empty"),
    "no caption": (PICTURE, None, "the caption is empty"),
    "no picture": (None, "a dog", "there is no picture"),
}


def check_bad_row(path, message, left=2):
    advice = r"To leave .* out, set `on_error` to skip\.$"
    with pytest.raises(TrainingError, match=rf"{message}\. {advice}"):
        open_source(path, 8)
    source = open_source(path, 8, on_error="skip")
    assert [source.caption(index, 0) for index in range(len(source))] == ["one", "three"]
    (skipped,) = source.skipped
    assert re.search(rf"{message}$", skipped)


@pytest.mark.parametrize(
    ("layout", "problem"),
    [pair for pair in product(LAYOUTS, PROBLEMS) if pair != ("txt", "no picture")],
)
def test_a_bad_row_is_named_and_refused_or_skipped(tmp_path, layout, problem):
    picture, caption, message = PROBLEMS[problem]
    if layout == "txt":
        if caption is None:
            message = "there is no b.txt"
        where = "/b.png"
    elif layout in PARQUETS:
        where = "/rows.parquet, row 2"
    else:
        where = rf"/{layout}, row 2 \(b.png\)"
    rows = [("a.png", PICTURE, "one"), ("b.png", picture, caption), ("c.png", PICTURE, "three")]
    write(tmp_path, layout, rows)
    check_bad_row(tmp_path, f"{where}: {message}")


@pytest.mark.parametrize(
    ("layout", "line", "message"),
    [
        ("metadata.jsonl", '{"file_name": "b.png", "text"', r": this is not JSON \(Expecting .*\)"),
        ("metadata.jsonl", '["b.png", "two"]', ": this is no JSON object but list"),
        (
            "metadata.jsonl",
            '{"file_name": "b.png", "text": 2}',
            r".*: the caption must be text, not int",
        ),
        ("metadata.jsonl", '{"file_name": null, "text": "two"}', ".*: there is no picture"),
        ("metadata.csv", "b.png,two, three", ": 3 values for 2 columns; .*"),
        ("metadata.csv", "b.png", ": 1 values for 2 columns; .*"),
        ("metadata.csv", "b.png,", ".*: the caption is empty"),
    ],
)
def test_a_bad_line_of_a_table(tmp_path, layout, line, message):
    write(tmp_path, layout, [("a.png", PICTURE, "one"), ("c.png", PICTURE, "three")])
    lines = (tmp_path / layout).read_text().splitlines()
    (tmp_path / layout).write_text("\n".join([*lines[:-1], line, lines[-1]]))
    check_bad_row(tmp_path, f"/{layout}, row 2{message}")


def test_a_caption_file_that_is_not_utf8(tmp_path):
    write(tmp_path, "txt", [(f"{text}.png", PICTURE, text) for text in ("one", "other", "three")])
    (tmp_path / "other.txt").write_bytes("grün".encode("latin-1"))
    check_bad_row(tmp_path, r"/other.png: other.txt is not UTF-8 \(.*byte 0xfc.*\)")


def test_a_picture_too_large_for_pillow(tmp_path, monkeypatch):
    rows = [("a.png", plain(RED), "one"), ("b.png", PICTURE, "two"), ("c.png", plain(RED), "three")]
    write(tmp_path, "txt", rows)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200)
    check_bad_row(tmp_path, r"/b.png: the picture is damaged \(.*1024 pixels.*\)")


def test_parquet_of_paths_opens_no_files(tmp_path):
    (tmp_path / "b.png").write_bytes(PICTURE)
    write_parquet(tmp_path / "rows.parquet", [("b.png", str(tmp_path / "b.png"), "one")])
    with pytest.raises(TrainingError, match=r"rows.parquet, row 1: .* must be bytes, not str"):
        open_source(tmp_path, 8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_usable(tmp_path, layout):
    write(tmp_path, layout, [(f"{n}.png", b"text", "a dog") for n in range(3)])
    message = r"no usable example\. Skipped: 3; the first: .*: this is not a PNG, JPEG, WebP"
    with pytest.raises(TrainingError, match=message):
        open_source(tmp_path, 8, on_error="skip")


# Sources that cannot be read, whatever is done with bad rows


def check_refused(path, message, **columns):
    for on_error in ("refuse", "skip"):
        with pytest.raises(TrainingError, match=message):
            open_source(path, 8, on_error, **columns)


@pytest.mark.parametrize("layout", ["metadata.jsonl", "metadata.csv", "bytes"])
def test_missing_columns(tmp_path, layout):
    write(tmp_path, layout, ROWS)
    where, has = rf"/{layout}, row 1", "file_name, text"
    if layout == "bytes":
        where, has = "/rows.parquet", r"id, image, text.* with `caption_column` and `image_column`"
    check_refused(tmp_path, rf"{where}: no column title; it has {has}\.", caption_column="title")
    both = {"caption_column": "title", "image_column": "picture"}
    check_refused(tmp_path, rf"{where}: no column picture, title; it has {has}\.", **both)


@pytest.mark.parametrize("is_absolute", [True, False])
def test_a_path_that_points_outside(tmp_path, is_absolute):
    folder = tmp_path / "data"
    folder.mkdir()
    name = str(tmp_path / "a.png") if is_absolute else "../a.png"
    write(folder, "metadata.jsonl", [("in.png", PICTURE, "a dog"), (name, PICTURE, "a cat")])
    check_refused(folder, r"row 2 points outside the folder of its table: .*/a\.png")


def test_a_name_that_no_file_has(tmp_path):
    (tmp_path / "0.png").write_bytes(PICTURE)
    rows = {"file_name": "0\0.png", "text": "a dog"}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(rows))
    check_refused(tmp_path, r"row 1: no file has a zero byte in its name\. Received: '0\\x00\.png'")


def test_no_such_thing(tmp_path):
    check_refused(tmp_path / "gone", r"No such file or folder: .*/gone")
    check_refused(tmp_path, r" has no pictures \(\.png, \.jpg, \.jpeg, \.webp\)")
    (tmp_path / "a.png").write_bytes(PICTURE)
    check_refused(tmp_path / "a.png", r"must be a folder or a \.parquet file\. Received: .*/a\.png")
    with pytest.raises(TrainingError, match=r"one of refuse, skip\. Received: ignore"):
        open_source(tmp_path, 8, on_error="ignore")
    (tmp_path / "metadata.csv").write_bytes("file_name,text\na.png,grün".encode("latin-1"))
    check_refused(tmp_path, r"/metadata\.csv, line 2, is not UTF-8: .*byte 0xfc")
    (tmp_path / "metadata.csv").write_text("file_name,text\n")
    check_refused(tmp_path, r" has no usable example\. Skipped: 0\.$")


def test_what_is_no_parquet(tmp_path):
    path = tmp_path / "rows.parquet"
    write_parquet(path, ROWS)
    whole = path.read_bytes()
    damaged = whole[:4] + b"\xff" * 400 + whole[404:]  # a page, behind a footer that is right
    for content in (b"", b"file_name,text\n", whole[:-20], damaged):
        path.write_bytes(content)
        check_refused(tmp_path, r"/rows\.parquet is not readable as parquet: ")


# Pictures

SHADES = np.array([[0, 1, 100, 200, 255]], "uint8")
PALETTE = Image.fromarray(np.array([[0, 1, 2]], "uint8"), "P")
PALETTE.putpalette([*RED, *GREEN, *BLUE])


def one_row(*pixels, mode=None):
    return Image.fromarray(np.array([pixels], "uint8"), mode)


@pytest.mark.parametrize(
    ("image", "options", "mode", "expected"),
    [
        (
            one_row((*RED, 255), (*RED, 0), (0, 100, 200, 51)),
            {},
            "RGBA",
            [RED, WHITE, (204, 224, 244)],  # 255 (1 - 0.2) + 0.2 colour
        ),
        (one_row((0, 255), (0, 51), mode="LA"), {}, "LA", [(0,) * 3, (204,) * 3]),
        (PALETTE, {}, "P", [RED, GREEN, BLUE]),
        (PALETTE, {"transparency": 1}, "P", [RED, WHITE, BLUE]),
        (PALETTE, {"transparency": bytes([255, 255, 51])}, "P", [RED, GREEN, (204, 204, 255)]),
        (one_row(RED, GREEN), {"transparency": RED}, "RGB", [WHITE, GREEN]),
        (Image.fromarray(SHADES), {}, "L", [(v,) * 3 for v in SHADES[0]]),
        (Image.fromarray(SHADES > 50), {}, "1", [(0,) * 3] * 2 + [WHITE] * 3),
        (Image.fromarray(SHADES.astype("uint16") * 257), {}, "I;16", [(v,) * 3 for v in SHADES[0]]),
        (  # 16 bits however dark, and rounded
            Image.fromarray(np.array([[0, 128, 129, 255]], "uint16")),
            {},
            "I;16",
            [(0,) * 3] * 2 + [(1,) * 3] * 2,
        ),
    ],
)
def test_modes_become_rgb(image, options, mode, expected):
    with Image.open(io.BytesIO(encoded(image, **options))) as read:
        assert read.mode == mode
        converted = to_rgb(read)
    assert converted.mode == "RGB"
    np.testing.assert_array_equal(np.array(converted)[0], expected)


@pytest.mark.parametrize("scale", [1, 257])
def test_32_bit_integers_are_8_or_16_bits(scale):
    image = to_rgb(Image.fromarray(SHADES.astype("int32") * scale))
    np.testing.assert_array_equal(np.array(image)[..., 0], SHADES)


def test_cmyk():
    picture = encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=100)
    np.testing.assert_allclose(read_picture(picture, 8).reshape(-1, 3), [RED] * 64, atol=2)


@pytest.mark.parametrize(
    ("orientation", "top_left", "bottom_right"),
    [(1, RED, BLUE), (3, BLUE, RED), (6, RED, BLUE), (8, BLUE, RED)],
)
def test_exif_orientation(orientation, top_left, bottom_right):
    """A camera held upright stores 6: what is stored at the left belongs at the top."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 100, "subsampling": 0, "exif": exif}
    pixels = read_picture(encoded(stripes(RED, BLUE).resize((20, 20)), "JPEG", **options), 20)
    is_turned = orientation in (6, 8)
    upright = pixels.swapaxes(0, 1) if is_turned else pixels
    np.testing.assert_allclose(upright[:, 2], [top_left] * 20, atol=3)
    np.testing.assert_allclose(upright[:, -3], [bottom_right] * 20, atol=3)


@pytest.mark.parametrize("size", [5, 10, 16])
@pytest.mark.parametrize("is_tall", [True, False])
def test_the_middle_is_cut_out(tmp_path, size, is_tall):
    image = stripes(RED, GREEN, BLUE)
    path = tmp_path / "a.png"
    (image.transpose(Image.Transpose.TRANSPOSE) if is_tall else image).save(path)
    for picture in (path, path.read_bytes()):
        pixels = read_picture(picture, size)
        assert pixels.dtype == np.uint8
        assert pixels.shape == (size, size, 3)
        atol = 0 if size == 10 else 40  # where it scales, Lanczos looks a little beyond the edge
        np.testing.assert_allclose(pixels.reshape(-1, 3), [GREEN] * size**2, atol=atol)


def test_what_is_no_picture_is_not_read():
    with pytest.raises(PictureError, match=r"^this is not a PNG, JPEG, WebP or AVIF picture$"):
        read_picture(b"a dog", 8)


# The world


def test_the_world_is_a_function_of_its_arguments():
    source, again, other = World(9, 64, seed=4), World(9, 64, seed=4), World(9, 64, seed=5)
    assert len(source) == 9
    for index in (8, 0, 3):
        picture = source.picture(index)
        scene = world.sample_scene(index, 4)
        np.testing.assert_array_equal(picture, again.picture(index))
        np.testing.assert_array_equal(picture, world.draw(scene, 64))
        assert (picture != other.picture(index)).any()
        captions = [source.caption(index, epoch) for epoch in range(8)]
        assert captions == [again.caption(index, epoch) for epoch in range(8)]
        assert captions[0] == world.describe(scene, index, 4)[0]
        assert len(set(captions)) > 4


@pytest.mark.parametrize("seed", [0, 1, 77])
def test_training_shows_and_says_no_held_out_pair(seed):
    source = World(150, 64, seed)
    for index in range(len(source)):
        things = world.read(source.picture(index)).things
        assert things
        assert not {(thing.shape, thing.colour) for thing in things} & HELD_OUT
        for epoch in range(3):
            caption = source.caption(index, epoch)
            assert not [pair for pair in HELD_OUT if " ".join(pair[::-1]) in caption]


# Order


def test_every_epoch_has_every_example_once_in_an_order_of_its_own():
    count, epochs = 50, 6
    orders = []
    for seed in (0, 1):
        places = [shuffled(position, count, seed) for position in range(epochs * count)]
        for epoch in range(epochs):
            indices, of_epochs = zip(*places[epoch * count :][:count], strict=True)
            assert sorted(indices) == list(range(count))
            assert set(of_epochs) == {epoch}
            orders.append(indices)
        backwards = [shuffled(p, count, seed) for p in reversed(range(epochs * count))]
        assert backwards[::-1] == places
    assert len({*orders, tuple(range(count))}) == 2 * epochs + 1


# Batches

BATCH, SIDE, STEPS = 8, 4, 500


class Numbered:
    """A source whose examples say which they are."""

    def __len__(self):
        return 30

    def picture(self, index):
        return np.full((SIDE, SIDE, 3), index, "uint8")

    def caption(self, index, epoch):
        return f"{index} {epoch}"


def tokenize(texts):
    """Index and epoch as tokens; -1 for a caption that was dropped."""
    ids = [[int(n) for n in text.split()] or [-1, -1] for text in texts]
    return {"tokens": np.array(ids, "int32")}


LATENTS = np.arange(30, dtype="float16").reshape(30, 1, 1, 1) + np.zeros((SIDE, SIDE, 2), "float16")


def latent_batches(seed=3, num_timesteps=1000, **options):
    settings = replace(micro.SETTINGS, batch_size=BATCH, seed=seed)
    config = replace(
        micro.CONFIG,
        autoencoder=replace(micro.CONFIG.autoencoder, scaling_factor=0.5),
        schedule=replace(micro.CONFIG.schedule, num_train_timesteps=num_timesteps),
    )
    return LatentBatches(Numbered(), settings, LATENTS, config, tokenize, **options)


def picture_batches(seed=3):
    return PictureBatches(Numbered(), BATCH, seed, (2, 2, 4))


def collected(batches, name):
    return np.stack([batches(step)[name] for step in range(STEPS)])


@pytest.mark.parametrize("make", [latent_batches, picture_batches])
def test_a_batch_is_a_function_of_seed_and_step(make):
    once = [make()(step) for step in range(12)]
    batches = make()
    for step in (11, 0, 5, 5, 4, 10):
        again = batches(step)
        assert again.keys() == once[step].keys()
        for name, array in again.items():
            np.testing.assert_array_equal(array, once[step][name])
            assert (array != once[step - 1][name]).any(), name
            assert (array != make(seed=4)(step)[name]).any(), name


def test_pictures_and_their_noise():
    batches = picture_batches()
    for step in range(12):
        batch = batches(step)
        indices = [shuffled(step * BATCH + place, 30, 3)[0] for place in range(BATCH)]
        assert batch["images"].shape == (BATCH, SIDE, SIDE, 3)
        np.testing.assert_array_equal(
            batch["images"][:, 0, 0, 0], np.array(indices, "float32") / 127.5 - 1
        )
    noise = collected(batches, "noise")
    assert noise.shape == (STEPS, BATCH, 2, 2, 4)
    assert noise.dtype == np.float32
    assert (noise.mean(), noise.std()) == pytest.approx((0, 1), abs=0.02)


def test_rows_of_a_batch_belong_together():
    batches = latent_batches(caption_dropout=0.0)
    for step in range(12):
        batch = batches(step)
        places = [shuffled(step * BATCH + place, 30, 3) for place in range(BATCH)]
        np.testing.assert_array_equal(batch["tokens"], places)
        assert batch["latents"].dtype == batch["noise"].dtype == np.float32
        assert batch["latents"].shape == batch["noise"].shape == (BATCH, SIDE, SIDE, 2)
        expected = 0.5 * batch["tokens"][:, 0].reshape(BATCH, 1, 1, 1)
        np.testing.assert_array_equal(
            batch["latents"], np.broadcast_to(expected, batch["latents"].shape)
        )


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_captions_are_dropped_as_often_as_asked(share):
    dropped = collected(latent_batches(caption_dropout=share), "tokens")[..., 0] == -1
    exactly = share in (0.0, 1.0)
    assert dropped.mean() == pytest.approx(share, abs=0.0 if exactly else 0.03)
    if not exactly:  # no place of the batch is favoured: five standard deviations
        spread = 5 * (share * (1 - share) / STEPS) ** 0.5
        assert abs(dropped.mean(axis=0) - share).max() < spread


@pytest.mark.parametrize("num_timesteps", [1000, 200])
def test_timesteps_are_one_of_each_part_and_uniform(num_timesteps):
    timesteps = collected(latent_batches(num_timesteps=num_timesteps), "timesteps")
    assert timesteps.dtype == np.int32
    assert (timesteps.min(), timesteps.max()) == (0, num_timesteps - 1)
    parts = np.sort(timesteps * BATCH // num_timesteps, axis=1)
    np.testing.assert_array_equal(parts, np.broadcast_to(np.arange(BATCH), (STEPS, BATCH)))
    counts = np.bincount(timesteps.ravel() * 40 // num_timesteps)  # five bins to a part
    assert counts.shape == (40,)
    assert abs(counts - STEPS / 5).max() < 5 * (STEPS * 0.2 * 0.8) ** 0.5
    spread = 5 * num_timesteps / (12 * STEPS) ** 0.5  # no place of the batch has a part of its own
    assert abs(timesteps.mean(axis=0) - num_timesteps / 2).max() < spread


def test_to_model():
    levels = to_model(np.arange(256, dtype="uint8"))
    assert levels.dtype == np.float32
    assert (levels[0], levels[255]) == (-1.0, 1.0)
    np.testing.assert_allclose(np.diff(levels), 2 / 255, rtol=1e-4)


def test_a_prior_has_its_own_examples_and_noise():
    """And the loss is diffusers': that of the examples plus the weight times that of the class."""
    one, other = latent_batches(seed=3), latent_batches(seed=4)
    batch = PriorBatches(one, other, 0.25)(7)
    for name, value in one(7).items():
        np.testing.assert_array_equal(batch[name], np.concatenate([value, other(7)[name]]))
    assert batch["weights"].tolist() == [2.0] * BATCH + [0.5] * BATCH

    loss = micro.denoising()
    examples, of_class = (micro.latent_batch(micro.CONFIG, 2, step) for step in (0, 1))
    loss.denoiser.conv_out.bias.assign([0.1, 0.2, 0.3, 0.4])
    batch = PriorBatches(lambda step: examples, lambda step: of_class, 0.25)(0)
    expected = float(loss(examples)[0]) + 0.25 * float(loss(of_class)[0])
    assert float(loss(batch)[0]) == pytest.approx(expected, rel=1e-5)
