"""ControlNets: the calls that use them, and the pictures that they see."""

from dataclasses import replace

import numpy as np
import pytest
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils import load_image
from PIL import Image

from sd_tf.runtime.call import Call
from sd_tf.runtime.controls import FIRST, GUESS, SCALES, STOP, ControlRecord, calls_of
from sd_tf.runtime.parameter import CallError, Each
from sd_tf.runtime.request import read_request
from tests.test_call import manifest

# Shares of the steps


@pytest.mark.parametrize("first", [0, 3])
def test_calls_of_a_share(first):
    """Diffusers' own formula, for many numbers of calls and shares."""
    shares = [(0.0, 1.0), (0.1, 0.9), (0.3, 0.7), (1 / 3, 2 / 3), (0.0, 0.01), (0.99, 1.0)]
    for count in (*range(1, 60), 999, 1000):
        for start, end in shares:
            kept = [not (i / count < start or (i + 1) / count > end) for i in range(count)]
            low, high = calls_of(start, end, first, first + count)
            assert [low <= first + i < high for i in range(count)] == kept


# Calls

TWO = manifest(controls=(ControlRecord("canny", False), ControlRecord("depth", False)))
ONE = manifest(controls=(ControlRecord("canny", False),))
LINES, HILLS = (np.full((64, 64, 3), level, "uint8") for level in (10, 200))


def read(by, *prompts, **parameters):
    return read_request(by, Call(list(prompts) or "a", num_steps=8, **parameters))


def test_one_value_is_for_all_nets():
    request = read(TWO, control_image=LINES, control_scale=0.5)
    assert request.shared.control_scale == (0.5, 0.5)
    assert request.shared.control_start == (0.0, 0.0)
    np.testing.assert_array_equal(request.controls[SCALES], np.float32([0.5, 0.5]))
    np.testing.assert_array_equal(request.controls[STOP], [8, 8])
    assert all(picture is LINES for picture in request.shared.control_image)


def test_a_list_has_one_for_each_net():
    request = read(
        TWO, control_image=[LINES, None], control_scale=[0.7, 3], control_end=[0.5, None]
    )
    np.testing.assert_array_equal(request.controls[SCALES], np.float32([0.7, 0]))
    np.testing.assert_array_equal(request.controls[FIRST], [0, 0])
    np.testing.assert_array_equal(request.controls[STOP], [4, 8])
    assert not request.controls[GUESS]


def test_the_share_of_a_net_without_a_picture_is_not_looked_at():
    ends = {"control_start": 0.6, "control_end": [0.9, 0.5]}
    request = read(TWO, control_image=[LINES, None], **ends)
    np.testing.assert_array_equal(request.controls[SCALES], np.float32([1, 0]))
    with pytest.raises(CallError, match=r"above control_start, 0\.6\. Received: 0\.5"):
        read(TWO, control_image=[LINES, HILLS], **ends)


def test_a_net_whose_share_is_empty_is_off():
    """Its picture is not even embedded; whether it has all guess does not depend on that."""
    pooling = replace(TWO, controls=(ControlRecord("shuffle", True), TWO.controls[1]))
    request = read(pooling, control_image=LINES, control_start=[0.1, 0], control_end=[0.2, 1])
    np.testing.assert_array_equal(request.controls[SCALES], [0, 1])
    assert request.controls[GUESS]


def test_what_is_told_of_a_call():
    """Nothing of a net that was not run, and how many pictures there were."""
    request = read(TWO, control_image=[LINES, None], control_scale=[0.7, 3], control_end=0.5)
    told = request.shared.described()
    assert told["control_scale"] == [0.7, None] and told["control_end"] == [0.5, None]
    assert request.shared.picture_counts() == {"control_image": [1, None]}


def test_pictures_for_each_prompt():
    given = Each([[LINES, HILLS], [HILLS, LINES]])
    request = read(TWO, "a", "b", control_image=given)
    assert request.each[1].control_image[0][0, 0, 0] == 200
    both = read(ONE, "a", "b", control_image=np.stack([LINES, HILLS]))
    assert [call.control_image[0][0, 0, 0] for call in both.each] == [10, 200]
    again = read_request(ONE, Call.joined(both.each))
    assert [call.control_image[0][0, 0, 0] for call in again.each] == [10, 200]


def test_no_picture_is_no_control():
    request = read(TWO)
    np.testing.assert_array_equal(request.controls[SCALES], [0, 0])
    for nothing in ([None, None], Each([[None, None]])):
        other = read(TWO, control_image=nothing, control_scale=0.5)
        assert other.shared.alike() == request.shared.alike()
        assert other.shared.picture_counts() == {}
        np.testing.assert_array_equal(other.controls[SCALES], [0, 0])
    assert read(manifest()).controls == {}


def test_a_net_that_pools_guesses():
    pooling = manifest(controls=(ControlRecord("shuffle", True),))
    assert read(pooling, control_image=LINES).controls[GUESS]
    assert read(ONE, control_image=LINES, control_guess=True).controls[GUESS]


@pytest.mark.parametrize(
    ("pictures", "scales", "guesses"),
    [
        ([LINES, HILLS], [1, 1], True),
        ([LINES, None], [1, 1], True),
        ([None, HILLS], [1, 1], False),
        ([LINES, HILLS], [0, 1], False),
        ([LINES, HILLS], [0, 0], False),
    ],
)
def test_the_first_net_that_is_on_decides_whether_all_guess(pictures, scales, guesses):
    both = manifest(controls=(ControlRecord("shuffle", True), ControlRecord("canny", False)))
    given = {"control_image": pictures, "control_scale": scales}
    assert read(both, **given).controls[GUESS] == guesses
    paints = {"image": LINES, "mask": LINES[..., 0]}
    painter = replace(both, latent_inputs="mask_and_image")
    assert read(painter, **given, **paints).controls[GUESS] == guesses
    assert not read(replace(painter, time_ids=6), **given, **paints).controls[GUESS]


def test_pictures_share_a_batch_if_they_use_the_same_nets():
    first, other, both = (
        read(TWO, control_image=pictures).shared.alike()
        for pictures in ([LINES, None], [None, LINES], [HILLS, None])
    )
    assert first == both != other


@pytest.mark.parametrize(
    ("by", "given", "message"),
    [
        (ONE, {"control_scale": 1}, "control_scale goes with control_image: give both"),
        (manifest(), {"control_image": LINES}, "only for exports with ControlNets"),
        (TWO, {"control_image": [LINES]}, r"ControlNets, canny, depth; .*Each.*\. Received: 1"),
        (TWO, {"control_image": LINES, "control_scale": [1, 2, 3]}, r"Received: 3"),
        (ONE, {"control_image": LINES, "control_scale": "x"}, "control_scale is a number"),
        (ONE, {"control_image": LINES, "control_start": 1.5}, "control_start is a number from 0"),
        (
            ONE,
            {"control_image": LINES, "control_start": 0.5, "control_end": 0.5},
            r"control_end is above control_start, 0\.5\. Received: 0\.5",
        ),
        (ONE, {"control_image": LINES[:5]}, r"control_image: A picture is .*\(5, 64, 3\)"),
        (ONE, {"control_image": LINES, "control_guess": 1}, "control_guess is yes or no"),
    ],
)
def test_calls_that_are_refused(by, given, message):
    with pytest.raises(CallError, match=message):
        read(by, **given)


def test_one_call_uses_the_same_nets():
    with pytest.raises(CallError, match="the same ControlNets in all pictures"):
        read(TWO, "a", "b", control_image=Each([[LINES, None], [None, LINES]]))


# Pictures

MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "YCbCr", "HSV")
# As the pipelines of ControlNets make it.
PROCESSOR = VaeImageProcessor(vae_scale_factor=8, do_convert_rgb=True, do_normalize=False)


def odd_picture(number):
    """A picture of an odd size, or of the drawn one, and one of the modes."""
    rng = np.random.default_rng(number)
    height, width = rng.integers(5, 200, 2) if number % 3 else (64, 64)
    levels = rng.integers(0, 256, (height, width, 4), "uint8")
    levels[: height // 2, : width // 3] = rng.integers(0, 256, 4)
    levels[height // 2 :, : width // 3, 3] = 0  # colours that are not seen
    mode = MODES[number % len(MODES)]
    image = Image.fromarray(levels, "RGBA")
    return image.convert(mode) if mode in ("RGBA", "LA") else image.convert("RGB").convert(mode)


def seen(image):
    """What a net is given of a picture, 64x64 px."""
    return read(ONE, control_image=image).shared.control_image[0].astype("float32") / 255


def processed(image):
    """What diffusers makes of it; transparent pixels are black where it scales nothing, too."""
    if image.has_transparency_data:
        image = image.convert("RGBA")
        if image.size == (64, 64):
            image = image.convert("RGBa").convert("RGBA")
    return published(image)


def published(image):
    return np.moveaxis(PROCESSOR.preprocess(image, 64, 64).numpy()[0], 0, -1)


def test_pictures_are_the_published_processors():
    """Bit for bit, on 54 pictures of many modes and odd sizes."""
    for number in range(54):
        image = odd_picture(number)
        np.testing.assert_array_equal(seen(image), processed(image), err_msg=image.mode)
        if image.size != (64, 64):  # then it shows colours that are not seen
            np.testing.assert_array_equal(seen(image), published(image), err_msg=image.mode)


@pytest.mark.filterwarnings("ignore:Palette images:UserWarning")
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("RGBA", {}),
        ("LA", {}),
        ("P", {"transparency": 3}),
        ("P", {"transparency": bytes(range(256))}),
        ("RGB", {"transparency": (0, 0, 0)}),
        ("RGB", {"format": "JPEG", "exif": {0x0112: 6}}),
        ("CMYK", {"format": "JPEG"}),
        ("RGBA", {"format": "WEBP", "lossless": True}),
    ],
)
def test_files_are_scaled_as_pictures_are(tmp_path, mode, options):
    """Upright, as diffusers' own reader turns them."""
    image = odd_picture(MODES.index(mode) + 9)
    form, exif = options.pop("format", "PNG"), Image.Exif()
    exif.update(options.pop("exif", {}))
    image.save(tmp_path / "x", form, exif=exif, **options)
    opened = Call.parameters()["control_image"].open_file(tmp_path / "x")
    upright = load_image(str(tmp_path / "x"), lambda image: image)
    assert opened.mode == upright.mode
    np.testing.assert_array_equal(seen(opened), processed(upright))


def test_white_lines_on_nothing_stay_lines():
    image = Image.new("RGBA", (64, 64), (255, 255, 255, 0))
    image.paste("white", (10, 0, 14, 64))
    scaled = seen(image.resize((100, 100)))
    assert scaled[:, 11:13].min() > 0.9 and scaled[:, 30:].max() == 0
    for same in (image, image.convert("LA"), image.quantize(8)):
        assert seen(same)[:, 10:14].min() == 1 and seen(same)[:, 14:].max() == 0, same.mode


def test_16_bits_are_scaled_to_8():
    """The processor clips them, so that nearly all is white."""
    levels = np.random.default_rng(0).integers(0, 256, (50, 70)).astype("uint8")
    deep = Image.fromarray(levels.astype("uint16") * 257)
    np.testing.assert_array_equal(seen(deep), processed(Image.fromarray(levels)))
    assert processed(deep).mean() > 0.95
