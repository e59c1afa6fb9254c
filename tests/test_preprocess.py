"""`sd-tf control`: drawings of pictures, without a network."""

import numpy as np
import pytest
from PIL import Image

from sd_tf.cli.main import main
from sd_tf.runtime.preprocess import KINDS


@pytest.fixture
def photo(tmp_path):
    y, x = np.mgrid[:48, :64]
    disc = np.hypot(y - 24, x - 24) < 12
    levels = np.stack([200 - 150 * disc, 200 - 150 * disc + x // 2, 200 - 150 * disc], -1).astype(
        "uint8"
    )
    Image.fromarray(levels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def made(photo, *arguments):
    assert main(["control", *arguments, str(photo)]) == 0
    return np.asarray(Image.open(photo.with_name(f"photo-{arguments[0]}.png")))


def test_canny_is_opencvs(photo):
    import cv2

    found = made(photo, "canny", "--low", "50", "--high", "120")
    expected = cv2.Canny(cv2.imread(str(photo))[..., ::-1].copy(), 50, 120)
    np.testing.assert_array_equal(found[..., 0], expected)
    assert found.shape == (48, 64, 3) and set(np.unique(found)) == {0, 255}


def test_scribbles_lie_where_it_is_darker_than_around(photo):
    lines = made(photo, "scribble")[..., 0] > 0
    distance = np.hypot(*(np.mgrid[:48, :64] - np.array([24, 24])[:, None, None])) - 12
    assert lines.any() and np.abs(distance[lines]).mean() < 4


def test_gray_and_tile(photo):
    picture = Image.open(photo)
    np.testing.assert_array_equal(made(photo, "gray")[..., 1], np.asarray(picture.convert("L")))
    tile = made(photo, "tile", "--factor", "8").astype("float32")
    original = np.asarray(picture).astype("float32")
    blocks = [x.reshape(6, 8, 8, 8, 3).mean((1, 3)) for x in (tile, original)]
    assert np.abs(blocks[0] - blocks[1]).mean() < 5 < np.abs(tile - original).mean()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gray", "--low", "3"], "--low is for canny. Received: gray"),
        (["canny", "--low", "300"], "--low is a whole number from 0 to 255. Received: 300"),
        (["tile", "--factor", "0"], "--factor is a whole number from 1. Received: 0"),
    ],
)
def test_control_refuses(photo, capsys, arguments, message):
    assert main(["control", *arguments, str(photo)]) == 1
    assert message in capsys.readouterr().err


def test_control_keeps_files(photo, capsys):
    made(photo, "gray")
    assert main(["control", "gray", str(photo)]) == 1
    assert "exists. Choose another --out" in capsys.readouterr().err
    assert main(["control", "gray", str(photo), "--overwrite"]) == 0
    assert list(KINDS) == ["canny", "scribble", "gray", "tile"]
    assert main(["control", "gray", str(photo.with_name("none.png"))]) == 1
    message = f"sd-tf control: No such file or directory: {photo.with_name('none.png')}\n"
    assert capsys.readouterr().err == message
