"""Pictures as prompts: the adapters' files, calls that use them, and every door they come by."""

import argparse
import base64
import io
import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import openai
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from playwright.sync_api import expect
from safetensors.numpy import load_file, save_file

from sd_tf.cli.drawing import add_drawing_arguments, read_wanted
from sd_tf.cli.main import main
from sd_tf.config import PREVIEW_DECODER
from sd_tf.export import ExportOptions, export
from sd_tf.runtime.call import Call
from sd_tf.runtime.image_prompts import (
    GIVEN,
    NO_IMAGE_PROMPTS,
    SCALES,
    ImageAdapterRecord,
    ImagePrompts,
    tokens_of,
)
from sd_tf.runtime.manifest import ExportError, Manifest
from sd_tf.runtime.parameter import CallError, Each
from sd_tf.runtime.png import read_parameters
from sd_tf.runtime.psnr import psnr
from sd_tf.runtime.request import read_request
from sd_tf.runtime.runner import Runner
from sd_tf.serving.batch.folder import _table
from sd_tf.serving.batch.rows import Unit, check_rows, check_settings
from sd_tf.serving.client import Client
from sd_tf.weights import CheckpointError, open_checkpoint
from sd_tf.weights.image_prompts import open_image_adapter
from tests.exports import (
    AS_WRITTEN,
    check_equal,
    micro_decoder,
    micro_export,
    micro_folder,
    micro_xl_folder,
    pipeline_of,
)
from tests.fronts import ask, generated, running_front
from tests.page_browser import artifacts, chromium
from tests.page_browser import opened as opened_page
from tests.peer_image_prompts import micro_image_adapters, shown_export
from tests.test_call import manifest
from tests.test_serving_images import form, post

PROMPT, STEPS = "a red bicycle", 2
CALL = {"num_steps": STEPS, "seed": 3}
PARTS = ("text_encoder", "diffusion_model", "decoder", "image_encoder", "vision_encoder")


def picture(seed, size=(40, 30)):
    levels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3)).astype("uint8")
    return Image.fromarray(levels)


MOON, SEA = picture(1), picture(2, (23, 57))


def coded(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


# Calls


def by(*names):
    prompts = ImagePrompts(tuple(ImageAdapterRecord(name, 4) for name in names), 2, 32, 16)
    record = manifest().components["decoder"]
    return manifest(image_prompts=prompts, components=dict.fromkeys(PARTS, record))


ONE, TWO = by("plus"), by("base", "plus")


def read(export, *prompts, **parameters):
    return read_request(export, Call(list(prompts) or "a", num_steps=2, **parameters))


def test_one_adapter_takes_a_picture_or_several():
    for given, count in ((MOON, 1), ([MOON], 1), ([MOON, SEA], 2), ([[MOON, SEA]], 2)):
        request = read(ONE, image_prompt=given, image_prompt_scale=0.5)
        [pictures] = request.shared.image_prompt
        assert [one.shape for one in pictures] == [(32, 32, 3)] * count
        np.testing.assert_array_equal(request.image_prompts[SCALES], np.float32([0.5]))


def test_of_several_adapters_each_has_its_own():
    request = read(TWO, image_prompt=[None, [MOON, SEA]], image_prompt_scale=[3, None])
    assert request.shared.image_prompt[0] is None and len(request.shared.image_prompt[1]) == 2
    np.testing.assert_array_equal(request.image_prompts[SCALES], np.float32([0, 1]))
    both = read(TWO, image_prompt=MOON).shared.image_prompt
    assert [len(pictures) for pictures in both] == [1, 1]
    np.testing.assert_array_equal(read(TWO).image_prompts[SCALES], np.float32([0, 0]))
    assert read(manifest()).image_prompts == {}


def test_each_prompt_has_its_own():
    given = Each([MOON, [MOON, SEA]])
    request = read(ONE, "a", "b", image_prompt=given)
    assert [len(call.image_prompt[0]) for call in request.each] == [1, 2]
    again = read_request(ONE, Call.joined(request.each))
    assert [len(call.image_prompt[0]) for call in again.each] == [1, 2]


@pytest.mark.parametrize(
    ("export", "given", "message"),
    [
        (ONE, {"image_prompt_scale": 1}, "image_prompt_scale goes with image_prompt: give both"),
        (manifest(), {"image_prompt": MOON}, r"only for exports with IP-Adapters \(--ip_adapter"),
        (TWO, {"image_prompt": [MOON]}, r"IP-Adapters, base, plus; .*Each.*\. Received: 1"),
        (ONE, {"image_prompt": [MOON] * 3}, r"1 to 2 pictures .*--image_prompts.*Each.*: 3"),
        (ONE, {"image_prompt": [MOON, None]}, "no empty place among.*: 2, of which 1 empty"),
        (TWO, {"image_prompt": [MOON, [None]]}, "no empty place among.*: 1, of which 1 empty"),
        (ONE, {"image_prompt": []}, r"1 to 2 pictures .*Received: 0"),
        (ONE, {"image_prompt": MOON, "image_prompt_scale": "x"}, "image_prompt_scale is a number"),
        (ONE, {"image_prompt": np.zeros((5, 5), "uint8")}, "image_prompt: A picture is a PIL"),
        (ONE, {"image_prompt": np.zeros((0, 5, 3), "uint8")}, r"has pixels\. Received: 5x0"),
        (ONE, {"image_prompt": picture(0, (2, 101))}, r"at most 50 times .*\. Received: 51 times"),
    ],
)
def test_calls_that_are_refused(export, given, message):
    with pytest.raises(CallError, match=message):
        read(export, **given)


def test_an_export_without_the_encoder():
    parts = dict(ONE.components)
    parts.pop("vision_encoder")
    export = manifest(image_prompts=ONE.image_prompts, components=parts)
    with pytest.raises(ExportError, match="no vision_encoder, which an image_prompt needs"):
        read(export, image_prompt=MOON)


class Encoder(Runner):
    """Keeps what its vision encoder was asked for."""

    asked = ()

    def call(self, component, endpoint, shape, **inputs):
        self.asked = [*self.asked, inputs[GIVEN].tolist()]
        tokens = np.ones((shape.batch_size, 4, 16), "float32")
        return {tokens_of(number): tokens for number in range(2)}


@pytest.mark.parametrize(("guidance", "asked"), [("classifier_free", [[0], [1]]), ("none", [[1]])])
def test_no_picture_is_encoded_for_guidance_alone(guidance, asked):
    export = replace(ONE, guidance=guidance)
    runner = Encoder(export, jit_compile=False)
    found = runner._image_prompts(read(export, image_prompt=MOON), range(1))
    assert runner.asked == asked
    assert found["unconditional_image_context"].any() == (guidance != "none")
    assert found[tokens_of(0)][0, :4].all() and not found[tokens_of(0)][0, 4:].any()


def test_of_an_adapter_at_scale_0_no_picture_is_encoded():
    for scales, asked in (([0, 0], []), ([0, 1], [[0], [1]])):
        runner = Encoder(TWO, jit_compile=False)
        request = read(TWO, image_prompt=[SEA, MOON], image_prompt_scale=scales)
        found = runner._image_prompts(request, range(1))
        assert [*runner.asked] == asked
        assert not found[tokens_of(0)].any() and found[tokens_of(1)].any() == bool(asked)


# Files


@pytest.fixture(scope="module")
def adapter():
    return micro_image_adapters() / "plus.safetensors"


def changed(adapter, path, change):
    tensors = load_file(adapter)
    save_file(change(tensors), path)
    return path


def test_the_file_tells_the_sizes(adapter):
    opened = open_image_adapter(adapter)
    projection = opened.config.projection
    assert (projection.kind, projection.num_tokens, projection.num_layers) == ("resampler", 5, 4)
    checkpoint = open_checkpoint(micro_folder(), ip_adapter=[adapter, adapter])
    assert checkpoint.image_adapters == ("plus", "plus")
    assert [*checkpoint.config.components][-6:-1] == [
        "vision_encoder",
        "image_projection",
        "image_attention",
        "image_projection_2",
        "image_attention_2",
    ]
    for part in [*checkpoint.config.components][-6:-1]:
        checkpoint.build(part)


def test_adapters_that_do_not_fit(adapter, tmp_path):
    with pytest.raises(CheckpointError, match="IP-Adapter for this SDXL UNet has"):
        open_checkpoint(micro_xl_folder(), ip_adapter=[adapter])

    def narrow(tensors):
        return {n: t[:, :-1] if n == "image_proj.proj_in.weight" else t for n, t in tensors.items()}

    wrong = changed(adapter, tmp_path / "narrow.safetensors", narrow)
    encoder = micro_image_adapters() / "image_encoder"
    with pytest.raises(CheckpointError, match="width 31, the vision encoder gives 32: give the en"):
        open_checkpoint(micro_folder(), ip_adapter=[wrong], image_encoder=encoder)
    with pytest.raises(CheckpointError, match="no vision encoder, which an IP-Adapter needs"):
        open_checkpoint(micro_folder(), ip_adapter=[wrong])
    with pytest.raises(CheckpointError, match="`image_encoder` goes with `ip_adapter`"):
        open_checkpoint(micro_folder(), image_encoder=encoder)
    with pytest.raises(CheckpointError, match="IP-Adapters are not for checkpoints that edit"):
        open_checkpoint("sd_tf/checkpoints/tiny-edit", ip_adapter=[adapter])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {n: x for n, x in t.items() if "ip_adapter" not in n}, "is not an IP-Adapter"),
        (lambda t: t | {"ip_adapter.1.to_q_lora.up.weight": t["image_proj.latents"]}, "FaceID"),
        (
            lambda t: {n.replace("latents", "perceiver_resampler.x"): x for n, x in t.items()},
            "is a FaceID adapter, which takes what a face network makes",
        ),
        (
            lambda t: {n: x for n, x in t.items() if "to_k_ip" not in n},
            r"in pairs, and it lacks ip_adapter\.1\.to_k_ip\.weight, .*3\.to_k",
        ),
        (
            lambda t: {n: x for n, x in t.items() if n != "ip_adapter.3.to_v_ip.weight"},
            r"is incomplete: .* it lacks ip_adapter\.3\.to_v_ip\.weight\.$",
        ),
        (
            lambda t: t | {"image_proj.latents": t["image_proj.latents"][0]},
            r"image_proj\.latents of .* must have 3 dimensions\. Received: \[\d+, \d+\]",
        ),
        (
            lambda t: t | {"ip_adapter.1.to_k_ip.weight": t["ip_adapter.1.to_k_ip.weight"][0]},
            r"ip_adapter\.1\.to_k_ip\.weight of .* must have 2 dimensions",
        ),
    ],
)
def test_files_that_are_refused(adapter, tmp_path, change, message):
    with pytest.raises(CheckpointError, match=message):
        open_image_adapter(changed(adapter, tmp_path / "x.safetensors", change))


def test_a_base_adapter_without_its_projection(tmp_path):
    """It is not taken for a FaceID adapter, some tensors of which are called the same."""
    path = changed(
        micro_image_adapters() / "base.safetensors",
        tmp_path / "x.safetensors",
        lambda t: {n: x for n, x in t.items() if n != "image_proj.proj.weight"},
    )
    with pytest.raises(CheckpointError, match=r"has no image_proj\.proj\.weight"):
        open_image_adapter(path)


def test_the_command_that_converts_published_pickles(adapter, tmp_path):
    """Each part's tensors are in a dictionary of its own there."""
    tensors, parts = load_file(adapter), {"image_proj": {}, "ip_adapter": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts[part][rest] = torch.from_numpy(tensor)
    torch.save(parts, tmp_path / "ip-adapter-plus.bin")
    with pytest.raises(CheckpointError) as caught:
        open_image_adapter(tmp_path / "ip-adapter-plus.bin")
    _, flag, code = shlex.split(str(caught.value).partition("convert it: ")[2])
    subprocess.run([sys.executable, flag, code], cwd=tmp_path, check=True)
    converted = load_file(tmp_path / "ip-adapter-plus.safetensors")
    assert converted.keys() == tensors.keys()
    assert all(np.array_equal(converted[name], tensor) for name, tensor in tensors.items())
    open_image_adapter(tmp_path / "ip-adapter-plus.safetensors")


def test_what_is_no_file(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        open_image_adapter(tmp_path / "none.safetensors")
    with pytest.raises(CheckpointError, match="is a pickle"):
        open_image_adapter(tmp_path / "ip-adapter_sd15.bin")


def test_weights_describes_it(adapter, tmp_path, capsys):
    assert main(["weights", str(adapter)]) == 0
    shown = capsys.readouterr().out
    assert "IP-Adapter" in shown and "5 for each picture" in shown
    wrong = changed(
        adapter,
        tmp_path / "x.safetensors",
        lambda t: t | {"image_proj.more": t["image_proj.latents"]},
    )
    assert main(["weights", str(wrong)]) == 1
    assert "no place in the model: image_proj.more" in capsys.readouterr().err


# An export


@pytest.fixture(scope="module")
def pipe():
    return pipeline_of(shown_export())


@pytest.fixture(scope="module")
def front():
    with running_front(shown_export(), num_steps=STEPS) as front:
        yield front


def test_the_manifest():
    found = Manifest.read(shown_export())
    assert found.image_prompts == ImagePrompts((ImageAdapterRecord("plus", 5),), 2, 32, 16)
    assert tuple(found.components) == PARTS
    sha256 = {name: list(one.checkpoint["sha256"]) for name, one in found.components.items()}
    assert sha256["vision_encoder"] == ["vision_encoder", "image_projection"]
    assert sha256["diffusion_model"] == ["unet", "image_attention"]
    for name in ("vision_encoder", "diffusion_model"):
        assert found.verification[name]["saved_model"]["psnr_db"] >= 60


def test_without_a_picture_it_is_the_plain_export(pipe):
    plain = pipeline_of(micro_export())(PROMPT, **CALL).images
    check_equal(pipe(PROMPT, **CALL).images, plain)
    off = pipe(PROMPT, image_prompt=MOON, image_prompt_scale=0, **CALL).images
    check_equal(off, plain)
    assert psnr(pipe(PROMPT, image_prompt=MOON, **CALL).images, plain, peak=255) < 40


def test_in_any_batch(pipe):
    """Each prompt is shown its own pictures, compiled or not."""
    given = Each([MOON, [SEA, MOON], MOON])
    many = pipe([PROMPT] * 3, num_steps=STEPS, seed=[3, 3, 3], image_prompt=given).images
    check_equal(many[0], many[2])
    compiled = pipeline_of(shown_export(), jit_compile=True)
    one = compiled(PROMPT, image_prompt=[SEA, MOON], **CALL).images[0]
    assert psnr(many[1], one, peak=255) >= 50 > psnr(many[0], one, peak=255)


def test_components_that_go_together(adapter, tmp_path):
    checkpoint = open_checkpoint(micro_folder(), ip_adapter=[adapter])
    size = {"height": 16, "width": 16, "max_steps": 2}
    for options, message in (
        ({"components": ("diffusion_model",)}, "exported with both: add them to the components"),
        ({"text_to_image": True}, "draw from a prompt alone.*Received: an IP-Adapter, plus"),
        ({"image_prompts": 0}, "places for at least 1 picture"),
    ):
        with pytest.raises(ExportError, match=message):
            export(checkpoint, tmp_path / "x", ExportOptions(**size, **options))
    assert not (tmp_path / "x").exists()


def test_replacing_other_components_keeps_it(tmp_path):
    """A loop without IP-Adapters takes the vision encoder away."""
    folder = shutil.copytree(shown_export(), tmp_path / "x")

    def replaced(*components, **parts):
        options = ExportOptions(**AS_WRITTEN, components=components, verify="off")
        export(open_checkpoint(micro_folder(), **parts), folder, options)
        manifest = Manifest.read(folder)
        manifest.check_files(folder)
        assert [*manifest.verification] == [*manifest.components]
        return manifest

    replaced(PREVIEW_DECODER, preview_decoder=micro_decoder())
    manifest = replaced("decoder")
    assert tuple(manifest.components) == (*PARTS, PREVIEW_DECODER)
    assert manifest.image_prompts.names == ["plus"]
    request = read(manifest, image_prompt=MOON)
    assert len(request.shared.image_prompt[0]) == 1
    manifest = replaced("diffusion_model")
    assert tuple(manifest.components) == (*PARTS[:4], PREVIEW_DECODER)
    assert manifest.image_prompts == NO_IMAGE_PROMPTS
    assert not (folder / "vision_encoder").exists()


def test_generate(load_once, pipe, tmp_path, capsys):
    for name, image in (("moon", MOON), ("sea", SEA)):
        image.save(tmp_path / f"{name}.png")
    command = ["generate", PROMPT, "--export_dir", str(shown_export()), "--num_steps", "2"]
    command += ["--seed", "3", "--nojit_compile", "--out", str(tmp_path)]
    shown = [
        flag for name in ("moon", "sea") for flag in ("--image_prompt", f"{tmp_path}/{name}.png")
    ]
    assert main([*command, *shown, "--image_prompt_scale", "0.7"]) == 0
    made = np.asarray(Image.open(tmp_path / "3.png"))
    expected = pipe(PROMPT, image_prompt=[MOON, SEA], image_prompt_scale=0.7, **CALL).images[0]
    assert psnr(made, expected, peak=255) >= 50
    parameters, pictures = read_parameters(tmp_path / "3.png")
    assert parameters["image_prompt_scale"] == [0.7] and pictures == {"image_prompt": [2]}
    capsys.readouterr()
    repeat = ["generate", "--from_png", str(tmp_path / "3.png"), *command[2:-2]]
    for other in ([], shown[:2], ["--image_prompt="]):
        assert main([*repeat, *other]) == 1
        assert "give --image_prompt FILE,FILE again." in capsys.readouterr().err
    assert main([*repeat, *shown, "--out", str(tmp_path / "again")]) == 0
    again = np.asarray(Image.open(tmp_path / "again" / "3.png"))
    np.testing.assert_array_equal(again, made)
    assert main([*command, "--image_prompt=", "--out", str(tmp_path / "plain")]) == 0
    assert read_parameters(tmp_path / "plain" / "3.png")[1] == {}


def test_flags_with_several_pictures_for_several_adapters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, image in (("moon", MOON), ("sea", SEA), ("sea,moon", MOON)):
        image.save(f"{name}.png")
    parser = argparse.ArgumentParser()
    add_drawing_arguments(parser)

    def counts(*paths):
        flags = [text for path in paths for text in ("--image_prompt", path)]
        call = Call.of(**read_wanted(parser.parse_args(["a", "--num_steps", "2", *flags])))
        shown = read_request(TWO, call).shared.image_prompt
        return [None if one is None else len(one) for one in shown]

    assert counts("moon.png,sea.png", "sea.png") == [2, 1]
    assert counts("", "moon.png,sea.png") == [None, 2]
    assert counts("moon.png,sea.png") == [1, 1], "a list with one for each, as in a table's cell"
    assert counts("sea,moon.png") == [1, 1], "a file's own name"
    assert counts("moon.png, sea.png", " sea.png , moon.png") == [2, 2]
    with pytest.raises(OSError, match=r"'mon\.png'"):
        counts("moon.png,mon.png", "")


# Servers


def made_by(front, **body):
    return generated(front, PROMPT, **CALL, **body)[0]


def test_http(front, pipe):
    for given, same in ((coded(MOON), MOON), ([coded(MOON), coded(SEA)], [MOON, SEA])):
        made = made_by(front, image_prompt=given, image_prompt_scale=0.7)
        expected = pipe(PROMPT, image_prompt=same, image_prompt_scale=0.7, **CALL).images[0]
        assert psnr(made, expected, peak=255) >= 50
    np.testing.assert_array_equal(
        made_by(front, image_prompt=[given]), made_by(front, image_prompt=given)
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"image_prompt": [coded(MOON)] * 3}, "1 to 2 pictures"),
        ({"image_prompt": coded(Image.new("L", (10_000, 10_000)))}, "more than 16777216 pixels"),
        ({"image_prompt": coded(Image.new("L", (1, 60_000)))}, "at most 50 times as long"),
        ({"image_prompt": "AAAA"}, "this is not a PNG, JPEG, WebP or AVIF picture"),
        ({"image_prompt": [["?"]]}, "this is not base64"),
        ({"image_prompt": {"a": 1}}, "image_prompt"),
        ({"image_prompt_scale": 1}, "image_prompt_scale goes with image_prompt"),
    ],
)
def test_http_refuses(front, body, message):
    status, content = ask(front, "POST", "/generate", prompt=PROMPT, **body)
    assert status == 422 and message in content["error"]


def test_the_images_api(front):
    client = openai.OpenAI(base_url=f"http://{front.http}/v1", api_key="none", max_retries=0)
    more = {**CALL, "image_prompt": [coded(MOON), coded(SEA)], "image_prompt_scale": 0.5}
    response = client.images.generate(prompt=PROMPT, extra_body=more)
    made = np.asarray(Image.open(io.BytesIO(base64.b64decode(response.data[0].b64_json))))
    check_equal(made, generated(front, PROMPT, **more)[0])


def test_a_form_with_files(front):
    """The images API draws what the same pictures in base64 do."""
    files = [base64.b64decode(coded(image)) for image in (MOON, SEA)]
    status, content = post(
        front,
        form(
            ("prompt", PROMPT.encode()),
            ("image", files[0]),
            ("strength", b"1"),
            *((name, str(value).encode()) for name, value in CALL.items()),
            *(('image_prompt[]"; filename="a.png', file) for file in files),
        ),
    )
    assert status == 200, content
    given = {"image": coded(MOON), "strength": 1, "image_prompt": [coded(MOON), coded(SEA)]}
    _, image = generated(front, PROMPT, **given, **CALL)
    assert content["data"][0]["b64_json"] == image["png"]


def test_the_client(front, pipe):
    client = Client(f"grpc://{front.grpc}", shown_export(), jit_compile=False)
    arguments = {**CALL, "image_prompt": [MOON, SEA]}
    ours, theirs = (one(PROMPT, **arguments).images for one in (client, pipe))
    check_equal(ours, theirs)


def test_rows(tmp_path):
    export = Manifest.read(shown_export())
    MOON.save(tmp_path / "moon.png")
    picture(3, (101, 2)).save(tmp_path / "long.png")
    for name in ("cut.png", "cut.jpg"):
        MOON.save(tmp_path / name)
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-200])
    settings = check_settings({"seed": 0, "num_steps": 2}, export)
    entries = [
        {"prompt": "a", "image_prompt": "moon.png,moon.png", "image_prompt_scale": "0.5"},
        {"prompt": "b", "image_prompt": [["moon.png", "moon.png"]]},
        {"prompt": "c", "image_prompt": "moon.png"},
        {"prompt": "d", "image_prompt": "none.png"},
        {"prompt": "e", "image_prompt": ["moon.png"] * 3},
        {"prompt": "f", "image_prompt": "long.png"},
        {"prompt": "g", "image_prompt": "cut.png"},
        {"prompt": "h", "image_prompt": "moon.png,cut.jpg"},
    ]
    rows, failures = check_rows(entries, settings, export, tmp_path)
    path = str(tmp_path / "moon.png")
    assert [row.call.image_prompt for row in rows] == [[[path, path]], [[path, path]], [path]]
    table = pyarrow.parquet.read_table(io.BytesIO(_table(Unit(0, tuple(rows)), [b""] * 3)))
    assert table["image_prompt"].to_pylist() == [[[path, path]], [[path, path]], [[path]]]
    assert rows[0].call.image_prompt_scale == (0.5,)
    assert [failure.row for failure in failures] == [3, 4, 5, 6, 7]
    for failure, message in zip(
        failures,
        ["cannot be read", "1 to 2 pictures", "Received: 51 times", *["picture is damaged"] * 2],
        strict=True,
    ):
        assert message in failure.reason


def test_rows_that_flags_complete(tmp_path, monkeypatch):
    """Flags give pictures as `generate` takes them; a table's cell may have a name with commas."""
    monkeypatch.chdir(tmp_path)
    for name in ("moon.png", "sea.png", "sea,moon.png"):
        MOON.save(name)
    moon, sea = (str(tmp_path / name) for name in ("moon.png", "sea.png"))

    def drawn(export, entry, **flags):
        settings = check_settings({"seed": 0, "num_steps": 2, **flags}, export)
        rows, failures = check_rows([{"prompt": "a", **entry}], settings, export, tmp_path)
        assert failures == []
        return rows[0].call.image_prompt

    assert drawn(ONE, {}, image_prompt="moon.png,sea.png") == [[moon, sea]]
    assert drawn(ONE, {}, image_prompt=["moon.png", "sea.png"]) == [[moon, sea]]
    assert drawn(TWO, {}, image_prompt="moon.png, sea.png") == [moon, sea]
    assert drawn(TWO, {}, image_prompt=["moon.png,sea.png", ""]) == [[moon, sea], None]
    assert drawn(TWO, {}, image_prompt_scale=0.5) is None
    assert drawn(ONE, {"image_prompt": "sea,moon.png"}) == [str(tmp_path / "sea,moon.png")]
    assert drawn(ONE, {"image_prompt": ""}, image_prompt="moon.png") is None
    settings = check_settings({"seed": 0, "num_steps": 2}, TWO)
    long = ",".join(["moon.png"] * 600)
    [failure] = check_rows([{"prompt": "a", "image_prompt": long}], settings, TWO, tmp_path)[1]
    assert failure.reason.endswith("Received: 600")


@pytest.mark.long
def test_a_batch(pipe, tmp_path):
    MOON.save(tmp_path / "moon.png")
    rows = [
        {"prompt": PROMPT, "seed": 3, "image_prompt": "moon.png"},
        {"prompt": PROMPT, "seed": 3},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    command = ["serve", "batch", "--export_dir", str(shown_export()), "--num_steps", "2"]
    command += ["--prompts", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out")]
    assert main([*command, "--nojit_compile", "--workers", "1"]) == 0
    files = sorted((tmp_path / "out").glob("**/*.png"))
    shown, plain = (np.asarray(Image.open(file)) for file in files)
    expected = pipe(PROMPT, image_prompt=MOON, **CALL).images[0]
    assert psnr(shown, expected, peak=255) >= 50 > psnr(shown, plain, peak=255)


CURL = "async (made) => (await import(new URL('static/curl.js', document.baseURI))).curl(made)"


def test_the_page(front, tmp_path):
    MOON.save(tmp_path / "moon.png")
    SEA.save(tmp_path / "sea.png")
    both = [tmp_path / "moon.png", tmp_path / "sea.png"]
    with chromium() as browser, opened_page(browser, f"http://{front.http}/") as (page, seen):
        expect(page.locator("#generate")).to_have_attribute("aria-disabled", "false")
        page.fill("#prompt", PROMPT)
        page.set_input_files("#image_prompt", tmp_path / "moon.png")
        expect(page.locator("#image_prompt-seen")).to_be_visible()
        box = page.locator("#image_prompt-seen img").bounding_box()
        assert abs(box["width"] - box["height"]) < 2  # the middle square is what is looked at
        page.fill("#image_prompt_scale", "0.7")
        with page.expect_request("**/generate") as request:
            page.click("#generate")
        body = request.value.post_data_json
        assert base64.b64decode(body["image_prompt"]) == (tmp_path / "moon.png").read_bytes()
        assert body["image_prompt_scale"] == 0.7
        expect(page.locator("#state")).to_contain_text("Done in")
        page.set_input_files("#image_prompt", [*both, both[0]])
        page.click("#generate")
        expect(page.locator("#image_prompt-error")).to_have_text("At most 2 pictures.")
        page.set_input_files("#image_prompt", both)
        expect(page.locator("#image_prompt-seen img")).to_have_count(2)
        with page.expect_request("**/generate") as request:
            page.click("#generate")
        sent = request.value.post_data_json["image_prompt"]
        assert [base64.b64decode(one) for one in sent] == [file.read_bytes() for file in both]
        expect(page.locator("#cards > li")).to_have_count(2)
        page.screenshot(path=artifacts(tmp_path) / "image_prompt.png", full_page=True)
        files = {"image_prompt-2": ["moon.png"], "image_prompt-3": ["moon.png", "sea.png"]}
        made = {"image_prompt_scale": [1, 0.5, 1], "files": files}
        command = page.evaluate(CURL, made)
        older = page.evaluate(CURL, {"files": {"image_prompt": "moon.png"}})
        assert "image_prompt' 'moon.png'" in older, "of a picture that is kept from before"
        assert not seen.errors
    makes_body = command.split("| curl")[0].rstrip(" \\\n")
    result = subprocess.run(["bash", "-c", makes_body], cwd=tmp_path, stdout=subprocess.PIPE)
    first, second, third = json.loads(result.stdout)["image_prompt"]
    assert first is None, "of several adapters each has a place"
    assert base64.b64decode(second) == both[0].read_bytes()
    assert [base64.b64decode(one) for one in third] == [file.read_bytes() for file in both]
