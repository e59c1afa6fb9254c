"""Edits of the world and their truth; pairs from parquet, whole, divided and damaged."""

import io
import re
from collections import Counter

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from sd_tf.cli.main import main
from sd_tf.training import world
from sd_tf.training.hosts import Host
from sd_tf.training.pairs import CONTROLS, WorldPairs, open_pairs
from sd_tf.training.settings import TrainingError
from sd_tf.training.world.edits import KINDS
from sd_tf.training.world.scene import HELD_OUT, SPLITS
from sd_tf.training.write_pairs import write_pairs


def has_held_out(*scenes):
    return any((t.shape, t.colour) in HELD_OUT for scene in scenes for t in scene.things)


# The world's edits


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_oracle_agrees_with_the_truth(kind, split):
    """What the true picture shows is what was asked, and the picture before does not show it."""
    for index in range(25):
        edit = world.sample_edit(index, 5, split, kind)
        assert edit == world.sample_edit(index, 5, split, kind)
        assert world.followed(world.read(world.draw(edit.after)), edit), edit
        assert not world.followed(world.read(world.draw(edit.before)), edit), edit
        assert has_held_out(edit.before, edit.after) == (split == "held_out")


def test_only_what_was_asked_changes():
    for index in range(200):
        edit = world.sample_edit(index)
        before, after = edit.before, edit.after
        old, new = edit.things
        assert (before.background == after.background) == (edit.kind != "background")
        others = [thing for thing in before.things if thing is not old]
        assert all(thing in after.things for thing in others)
        assert len(after.things) - len(before.things) == {"add": 1, "remove": -1}.get(edit.kind, 0)
        same = world.untouched(edit, 64)
        pictures = [world.draw(scene) for scene in (before, after)]
        np.testing.assert_array_equal(pictures[0][same], pictures[1][same])
        assert not same.all()
        if edit.kind not in ("add", "background"):
            assert old.shape in edit.instruction or "it" in edit.instruction.split()
        for word in (new.shape, new.colour, new.size) if edit.kind == "add" else ():
            assert word in edit.instruction


def test_every_kind_comes_as_often():
    found = Counter(world.sample_edit(index).kind for index in range(1200))
    assert set(found) == set(KINDS)
    assert all(140 <= count <= 260 for count in found.values()), found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"split": "test"}, r"split must be one of train, held_out\. Received: 'test'"),
        ({"kind": "grow"}, r"kind must be one of colour, shape, .*\. Received: 'grow'"),
    ],
)
def test_what_the_world_does_not_have(given, message):
    with pytest.raises(world.WorldError, match=message):
        world.sample_edit(0, **given)


# Parquet


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs") / "data"
    assert main(["train", "edit_pairs", "--out", str(folder), "--count", "600"]) == 0
    return folder


def test_what_was_written_is_read(written):
    pairs, truth = open_pairs(written), WorldPairs(600, 64)
    assert len(pairs) == 600
    for index in (0, 1, 255, 256, 599):
        ours, expected = pairs.pair(index), truth.pair(index)
        assert ours.text == expected.text
        np.testing.assert_array_equal(np.asarray(ours.before), np.asarray(expected.before))
        np.testing.assert_array_equal(np.asarray(ours.after), np.asarray(expected.after))
    (file,) = written.glob("*.parquet")
    row = pyarrow.parquet.read_table(file).slice(3, 1).to_pylist()[0]
    edit = truth.edit(3)
    assert row["kind"] == edit.kind
    for name, scene in (("original_prompt", edit.before), ("edited_prompt", edit.after)):
        assert all(thing.shape in row[name] for thing in scene.things)


def test_kinds_take_turns(tmp_path):
    folder = tmp_path / "data"
    options = ["--count", "10", "--kinds", "move", "move", "shape", "--seed", "1"]
    assert main(["train", "edit_pairs", "--out", str(folder), *options]) == 0
    rows = pyarrow.parquet.read_table(folder).to_pylist()
    assert [row["kind"] for row in rows] == ["move", "move", "shape"] * 3 + ["move"]
    edits = [world.sample_edit(index, 1, "train", row["kind"]) for index, row in enumerate(rows)]
    assert [row["edit_prompt"] for row in rows] == [edit.instruction for edit in edits]


def test_a_kind_that_there_is_not(tmp_path, capsys):
    folder = tmp_path / "data"
    command = [
        "train",
        "edit_pairs",
        "--out",
        str(folder),
        "--count",
        "1",
        "--kinds",
        "move",
        "spin",
    ]
    assert main(command) == 1
    message = "are of colour, shape, add, remove, background, move. Received: spin"
    assert message in capsys.readouterr().err
    assert not folder.exists()


def test_it_writes_over_nothing(written, capsys):
    assert main(["train", "edit_pairs", "--out", str(written), "--count", "1"]) == 1
    assert "is not empty. Choose another --out, or empty it." in capsys.readouterr().err
    with pytest.raises(TrainingError, match=r"`count` is at least 1\. Received: 0"):
        write_pairs(written / "none", 0)


def test_the_other_published_layout(tmp_path):
    picture = png(Image.new("RGB", (8, 8), "red"))
    row = {"input_image": picture, "edit_prompt": "make it blue", "edited_image": picture}
    write(tmp_path / "toy.parquet", [row])
    pair = open_pairs(tmp_path / "toy.parquet").pair(0)
    assert pair.text == "make it blue" and pair.before.size == (8, 8)


@pytest.mark.parametrize(
    "names",
    [
        ("conditioning_image", "text", "image"),
        ("control_image", "caption", "image"),
        ("source", "text", "target"),
    ],
)
def test_pairs_for_a_controlnet(tmp_path, names):
    """As the Hub's data sets for ControlNets name them: the drawing, the caption, the picture."""
    drawing, picture = (png(Image.new("RGB", (8, 8), colour)) for colour in ("black", "red"))
    row = dict(zip(names, (drawing, "a red field", {"bytes": picture, "path": None}), strict=True))
    write(tmp_path / "data.parquet", [row] * 3)
    pairs = open_pairs(tmp_path / "data.parquet", columns=CONTROLS)
    pair = pairs.pair(2)
    assert len(pairs) == 3 and pair.text == "a red field"
    assert [one.getpixel((0, 0)) for one in (pair.before, pair.after)] == [(0, 0, 0), (255, 0, 0)]
    with pytest.raises(TrainingError, match="conditioning_image"):
        write(tmp_path / "other.parquet", [{**GOOD, "input_image": drawing}])
        open_pairs(tmp_path / "other.parquet", columns=CONTROLS)


def test_an_epoch_gives_every_pair_once(written):
    pairs = open_pairs(written)
    first = [pairs.order(i, 7) for i in range(600)]
    second = [pairs.order(600 + i, 7) for i in range(600)]
    assert sorted(index for index, _ in first) == sorted(i for i, _ in second) == list(range(600))
    assert {epoch for _, epoch in first} == {0} and {epoch for _, epoch in second} == {1}
    assert first != [(i, 0) for i in range(600)]
    assert [i for i, _ in first] != [i for i, _ in second]
    assert [pairs.order(i, 8) for i in range(600)] != first


def test_each_host_reads_its_own_part(written):
    parts = [open_pairs(written, host=Host(number, 3)) for number in range(3)]
    assert [len(part) for part in parts] == [256, 256, 88]
    whole = open_pairs(written)
    assert [part.pair(0).text for part in parts] == [
        whole.pair(start).text for start in (0, 256, 512)
    ]
    with pytest.raises(TrainingError, match=r"one row group for each of 4 hosts\. It has 3"):
        open_pairs(written, host=Host(3, 4))


# Damage

GOOD = {"input_image": None, "edit_prompt": "make it blue", "edited_image": None}


def png(picture, **options):
    file = io.BytesIO()
    picture.save(file, "PNG", **options)
    return file.getvalue()


def write(path, rows):
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, path, row_group_size=4)


def rows(**changed):
    """Eight rows; `changed` are the third's."""
    pictures = [png(Image.new("RGB", (8, 8), colour)) for colour in ("red", "blue")]
    good = {**GOOD, "input_image": pictures[0], "edited_image": pictures[1]}
    found = [{**good, "edit_prompt": f"number {i}"} for i in range(8)]
    found[2].update(changed)
    return found


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"edit_prompt": " "}, "there is no text"),
        ({"edit_prompt": None}, "there is no text"),
        ({"input_image": None}, "there is no picture before"),
        ({"edited_image": b"text"}, "after: this is not a PNG, JPEG, WebP or AVIF picture"),
        ({"edited_image": rows()[0]["edited_image"][:50]}, "after: the picture is damaged ("),
    ],
)
def test_a_damaged_row(tmp_path, changed, problem):
    path = tmp_path / "shard.parquet"
    write(path, rows(**changed))
    with pytest.raises(TrainingError, match=rf"shard\.parquet, row 3: {re.escape(problem)}"):
        open_pairs(path).pair(2)
    said = []
    pairs = open_pairs(path, "skip", report=said.append)
    assert [pairs.pair(2).text for _ in range(2)] == ["number 3"] * 2
    assert len(pairs.skipped) == 1
    (line,) = said
    assert line.startswith(f"skipped {path}, row 3: {problem}") and line.endswith("(1 so far)")


def test_a_file_that_is_cut_off(tmp_path):
    write(tmp_path / "a.parquet", rows())
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(TrainingError, match=r"b\.parquet is not readable as parquet"):
        open_pairs(tmp_path)
    said = []
    assert len(open_pairs(tmp_path, "skip", report=said.append)) == 8
    assert "b.parquet" in said[0]


def test_a_row_group_with_damaged_pages(tmp_path):
    """The footer is whole, so that it is found only when its rows are wanted."""
    path = tmp_path / "a.parquet"
    write(path, rows())
    content = bytearray(path.read_bytes())
    content[4:200] = bytes(196)
    path.write_bytes(content)
    with pytest.raises(TrainingError, match=r"a\.parquet, row 1: its row group cannot be read"):
        open_pairs(path).pair(0)
    said = []
    pairs = open_pairs(path, "skip", report=said.append)
    assert [pairs.pair(i).text for i in range(8)] == [f"number {4 + i % 4}" for i in range(8)]
    assert len(said) == 4

    write(path, rows()[:6])  # the next group is smaller
    content = bytearray(path.read_bytes())
    content[4:200] = bytes(196)
    path.write_bytes(content)
    pairs = open_pairs(path, "skip", report=said.append)
    assert [pairs.pair(i).text for i in range(4)] == ["number 4", "number 5"] * 2


def test_what_is_no_data(tmp_path):
    with pytest.raises(TrainingError, match="are read from a parquet file or a folder of them"):
        open_pairs(tmp_path / "nothing")
    write(tmp_path / "a.parquet", [{"image": b"", "text": ""}])
    with pytest.raises(TrainingError, match=r"input_image or original_image, edit_prompt and"):
        open_pairs(tmp_path)
    with pytest.raises(TrainingError, match=r"on_error must be one of refuse, skip\. Received: x"):
        open_pairs(tmp_path, "x")
    write(tmp_path / "a.parquet", [{**GOOD, "edit_prompt": "a"}])
    with pytest.raises(TrainingError, match=r"no usable pair\. Skipped: 1 rows\."):
        open_pairs(tmp_path, "skip").pair(0)
