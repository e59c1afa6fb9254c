"""A call is defined once: what its checks say, and where a parameter of it arrives."""

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sd_tf.runtime.adapter_places import NO_PLACES
from sd_tf.runtime.call import Call
from sd_tf.runtime.capabilities import use_of_picture
from sd_tf.runtime.chain import Chain
from sd_tf.runtime.image_prompts import NO_IMAGE_PROMPTS
from sd_tf.runtime.kinds import Kind
from sd_tf.runtime.manifest import ComponentRecord, ExportError, Manifest, SchedulerRecord
from sd_tf.runtime.needed_pictures import blank_pictures
from sd_tf.runtime.parameter import CallError, Parameter
from sd_tf.runtime.parameters import Parameters
from sd_tf.runtime.request import read_request
from sd_tf.runtime.reuse import NO_REUSE, ReuseRecord
from sd_tf.runtime.shapes import Shapes

ROOT = Path(__file__).parent.parent


def manifest(**changes) -> Manifest:
    """A manifest as an export of Stable Diffusion 1 in small has it, without the export."""
    record = ComponentRecord((), "cpu", (), {}, {"name": "tiny"})
    names = ("text_encoder", "diffusion_model", "decoder", "image_encoder")
    known = {
        "family": "sd1",
        "shapes": Shapes(((64, 64), (64, 96)), (2,), 8, 4),
        "max_steps": 8,
        "schedulers": {
            "ddim": SchedulerRecord(0, list(range(1, 9))),
            "lcm": SchedulerRecord(1, [1, 2, 3, 4, 0, 0, 0, 0]),
        },
        "default_sampler": "ddim",
        "guidance": "classifier_free",
        "latent_inputs": "none",
        "time_ids": 0,
        "adapters": NO_PLACES,
        "components": dict.fromkeys(names, record),
        "further_scales": (),
        "controls": (),
        "image_prompts": NO_IMAGE_PROMPTS,
        "reuse": NO_REUSE,
        "suited": {},
    }
    others = {field.name: None for field in dataclasses.fields(Manifest)}
    return Manifest(**{**others, **known, **changes})


def read(*values, by=None, **parameters):
    call = Call(*values, **{"num_steps": 2, **parameters})
    return read_request(manifest() if by is None else by, call)


PAINTER = manifest(family="inpaint", latent_inputs="mask_and_image")
LATE = manifest(schedulers={"ddim": SchedulerRecord(0, [0, 2, 3])}, max_steps=3)
EDITOR = manifest(family="instruct-pix2pix", latent_inputs="image")
PICTURE, MASK = np.zeros((64, 64, 3), "uint8"), np.zeros((64, 64), "uint8")


# What a call becomes


def test_each_picture_has_its_own_call():
    request = read(["a", "b"], "no", seed=5, image=[PICTURE, Image.new("L", (8, 8))])
    assert [call.prompt for call in request.each] == ["a", "b"]
    assert [call.seed for call in request.each] == [5, 6]
    assert [call.negative_prompt for call in request.each] == ["no", "no"]
    assert [call.image.shape for call in request.each] == [(64, 64, 3)] * 2
    assert request.chunk("seed", range(4)) == [5, 6, 6, 6]


def test_defaults_depend_on_what_a_picture_is_for():
    for by, given, expected in (
        (manifest(), {}, (None, None)),
        (manifest(), {"image": PICTURE}, (0.8, None)),
        (PAINTER, {"image": PICTURE, "mask": MASK}, (1.0, None)),
        (EDITOR, {"image": PICTURE}, (None, 1.5)),
    ):
        shared = read("a", by=by, **given).shared
        assert (shared.strength, shared.image_guidance_scale) == expected
        assert shared.scheduler == "ddim"


def test_defaults_of_the_family_and_the_checkpoint():
    usual, own = (
        Call("a").completed(manifest(suited=suited))
        for suited in ({}, {"num_steps": 4, "guidance_scale": 3.5})
    )
    assert (usual.num_steps, usual.guidance_scale) == (8, 7.5)  # at most the export's 8 steps
    assert (own.num_steps, own.guidance_scale) == (4, 3.5)
    editor = dataclasses.replace(EDITOR, suited={"image_guidance_scale": 1.2})
    assert read("a", by=editor, image=PICTURE).shared.image_guidance_scale == 1.2


def test_further_guidance():
    """Its scales are for exports that have it, and the negative prompt's goes with one."""
    flux = manifest(further_scales=("true_guidance_scale",))
    assert Call("a").completed(flux).true_guidance_scale == 1.0
    assert Call("a", "b", true_guidance_scale=2).completed(flux).true_guidance_scale == 2.0
    for more in ({}, {"true_guidance_scale": 1}):
        with pytest.raises(CallError, match="negative_prompt goes with true_guidance_scale above"):
            Call("a", "b", **more).completed(flux)
    with pytest.raises(CallError, match="true_guidance_scale above 1 goes with negative_p"):
        Call("a", true_guidance_scale=2).completed(flux)
    with pytest.raises(CallError, match=r"true_guidance_scale is a number from 1 to .*: 0.5"):
        Call("a", "b", true_guidance_scale=0.5).completed(flux)
    with pytest.raises(CallError, match=r"skip_layer_guidance_scale is only for SD3\.5"):
        Call("a", skip_layer_guidance_scale=2.8).completed(flux)
    skipping = manifest(further_scales=("skip_layer_guidance_scale",))
    assert Call("a").completed(skipping).skip_layer_guidance_scale == 0.0


def test_a_negative_prompt_needs_guidance():
    """An empty one, which forms and tables have, is as good as none."""
    plain = manifest(guidance="none")
    with pytest.raises(CallError, match=r"negative_prompt is only for exports with guidance"):
        Call("a", "b").completed(plain)
    with pytest.raises(CallError, match=r"this one was made without\.") as raised:
        Call(["a", "b"], ["", "c"]).completed(plain)
    assert raised.value.parameter == "negative_prompt"
    flux = manifest(further_scales=("true_guidance_scale",))
    for export in (plain, flux):
        assert Call("a", "").completed(export).negative_prompt == ""
        assert Call(["a", "b"], ["", ""]).completed(export).negative_prompt == ["", ""]


def test_reuse():
    with pytest.raises(CallError, match=r"reuse is only for exports that may reuse .*--reuse"):
        Call("a", reuse=2).completed(manifest())
    reusing = manifest(reuse=ReuseRecord(most=3, parts=2, channels=8))
    assert Call("a").completed(reusing).reuse == 1
    with pytest.raises(CallError, match=r"reuse .* from 1 to 3.* Received: 4"):
        Call("a", reuse=4).completed(reusing)


def test_none_is_the_default_and_zero_a_value():
    shared = read("a", num_steps=2, guidance_scale=None, seed=0).shared
    assert (shared.guidance_scale, shared.seed) == (7.5, 0)
    assert read("a", guidance_scale=0).shared.guidance_scale == 0.0
    assert read("a", "").shared.negative_prompt == ""


def test_random_seeds_differ():
    seeds = [call.seed for call in read(["a"] * 64).each]
    assert len(set(seeds)) == 64 and min(seeds) >= 0 and max(seeds) < 2**31


def test_sizes_of_sdxl():
    base = manifest(family="sdxl-base", time_ids=6)
    plain, told = read("a", by=base), read("a", by=base, original_size=[8, 9], crop_top_left=(1, 2))
    assert plain.time_ids.tolist() == [64, 64, 0, 0, 64, 64]
    assert told.time_ids.tolist() == [8, 9, 1, 2, 64, 64]
    refiner = manifest(family="sdxl-refiner", time_ids=5)
    assert read("a", by=refiner).time_ids.tolist() == [64, 64, 0, 0, 6.0]
    assert read("a", by=refiner).negative_time_ids.tolist() == [64, 64, 0, 0, 2.5]
    with pytest.raises(CallError, match=r"target_size is only for .* its refiner excepted"):
        read("a", by=refiner, target_size=(64, 64))


def test_blank_pictures_are_what_a_call_needs():
    assert [use_of_picture(by) for by in (manifest(), EDITOR, PAINTER)] == [
        "start",
        "edit",
        "paint",
    ]
    assert blank_pictures(manifest(), (64, 64)) == {}
    for by, names in ((EDITOR, ["image"]), (PAINTER, ["image", "mask"])):
        assert list(blank_pictures(by, (64, 64))) == names
        read("a", by=by, **blank_pictures(by, (64, 64)))


def test_calls_that_are_alike_are_joined_and_divided():
    call = Call(["a", "b"], ["c", "d"], seed=[1, 2], num_steps=3).completed(manifest())
    first, second = call.divided()
    assert first.alike() == second.alike()
    assert Call.joined([first, second]).divided() == call.divided()
    for other in ({"num_steps": 4}, {"negative_prompt": None}, {"scheduler": "lcm"}):
        changed = dataclasses.replace(call, **other).divided()
        assert changed[0].alike() != first.alike()


@pytest.mark.parametrize(
    ("by", "given", "message"),
    [
        (EDITOR, {}, "image is needed by checkpoints that edit .*; this one is instruct-pix2pix"),
        (PAINTER, {"image": PICTURE}, "mask is needed by checkpoints that paint"),
        (EDITOR, {"image": PICTURE, "strength": 1.0}, "strength is only for checkpoints that st"),
        (None, {"image": PICTURE, "image_guidance_scale": 1.0}, "image_guidance_scale is only for"),
        (None, {"strength": 1.0}, "strength goes with image"),
        (None, {"seed": 2**31 - 1, "prompt": ["a", "b"]}, "seed is .* Received: 2147483648"),
        (None, {"seed": True}, "seed is a whole number .* Received: True"),
        (None, {"prompt": "\ud800"}, "prompt is a text"),
        (None, {"prompt": None}, "prompt is a text of .* Received: None"),
        (None, {"scheduler": "lcm", "num_steps": 5}, "lcm takes num_steps from 1 to 4. .*: 5"),
        (LATE, {"num_steps": 1}, "ddim takes num_steps from 2 to 3. Received: 1"),
        (None, {"image": "a.png"}, "image: A picture is a PIL image"),
        (
            manifest(family="sdxl-base", time_ids=6),
            {"original_size": [10**400, 1]},
            "original_size is two whole numbers from 0 to 1000000, such as 512x768. Received",
        ),
    ],
)
def test_what_is_refused(by, given, message):
    with pytest.raises(ValueError, match=message):
        read(by=by, **{"prompt": "a", **given})


def test_the_steps_of_a_scheduler_are_a_parameters_error():
    """So a command names its flag, and a page its field."""
    with pytest.raises(CallError, match="The scheduler lcm takes") as raised:
        read("a", scheduler="lcm", num_steps=5)
    assert raised.value.parameter == "num_steps"


def test_a_picture_needs_an_encoder():
    components = {"decoder": manifest().components["decoder"]}
    with pytest.raises(ExportError, match="no image_encoder, which an image needs"):
        read("a", image=PICTURE, by=manifest(components=components))


def test_texts_become_values():
    known = Call.parameters()
    for name, text, value in (
        ("num_steps", "3", 3),
        ("num_steps", "3.0", 3),
        ("guidance_scale", "1e1", 10.0),
        ("original_size", "512x768", (512, 768)),
        ("prompt", "3", "3"),
        ("control_scale", "0.8,", (0.8, None)),
        ("control_end", " ,0.5, 1", (None, 0.5, 1.0)),
    ):
        assert known[name].check(known[name].from_text(text)) == value
    for name, text in (
        ("num_steps", "3.5"),
        ("guidance_scale", "x"),
        ("target_size", "1x2x3"),
        ("control_scale", ""),
        ("control_scale", "0.8,x"),
    ):
        with pytest.raises(CallError, match=rf"{name} is .*Received: '{text}'"):
            known[name].from_text(text)


def test_rules_say_their_bounds():
    def rule(kind, **bounds):
        return Parameter(kind, "", "", **bounds).rule()

    assert rule(Kind.NUMBER) == "a finite number"
    assert rule(Kind.NUMBER, least=0) == "a number of at least 0"
    assert rule(Kind.NUMBER, above=0) == "a number above 0"
    assert rule(Kind.NUMBER, most=2) == "a number up to 2"
    assert rule(Kind.WHOLE) == "a whole number"
    with pytest.raises(CallError):
        Parameter(Kind.NUMBER, "", "").check(float("inf"))
    with pytest.raises(CallError, match="adapters is a number from -100 to 100 for each name"):
        Call.parameters()["adapters"].check({"style": 10**400})


def test_python_shows_every_parameter():
    signature = inspect.signature(Chain.__call__)
    assert list(signature.parameters)[1:] == [*Call.parameters(), "callback", "callback_every"]
    assert signature.parameters["prompt_syntax"].default == "plain"
    for name, known in Call.parameters().items():
        assert f"{name}: {known.help}" in Chain.__call__.__doc__
    lines = {line.split(":")[0].strip(): line for line in Chain.__call__.__doc__.splitlines()}
    assert lines["image"].endswith("; one for all or one for each.")
    nets = "; one for all or a list with one for each of the export's ControlNets"
    assert lines["control_scale"].endswith(f"{nets}.")
    pictures = f"{nets}, or `Each([…])` with such a value for each prompt."
    assert lines["control_image"].endswith(pictures)


# Adding a parameter is one field

EVERYWHERE = """
import argparse, dataclasses, io, json, sys
import numpy as np
from sd_tf.runtime import call as module
from sd_tf.runtime.kinds import Kind
from sd_tf.runtime.parameter import parameter

shine = parameter(
    Kind.NUMBER, "Shine", "how much it shines", default=0.5, least=0, most=2, slider=(0, 2, 0.1)
)
# Before anything else imports it: from here on, this is the definition of a call.
module.Call = dataclasses.make_dataclass(
    "Call", [("shine", float | None, shine)], bases=(module.Call,), frozen=True, kw_only=True
)

from sd_tf.cli import generate, serve_batch, serve_client, jax_generate
from sd_tf.runtime.chain import Chain
from sd_tf.runtime.png import metadata, png_bytes, read_parameters
from sd_tf.runtime.request import read_request
from sd_tf.serving.batch.folder import _table
from sd_tf.serving.batch.rows import COLUMNS, Unit, check_rows, check_settings
from sd_tf.serving.errors import RefusedError
from sd_tf.serving.ray_app.body import Body, GenerateRequest, form_fields
from tests.test_call import manifest

found, by = {}, manifest()

def refusal(work):
    try:
        return work()
    except (ValueError, RefusedError) as error:
        return str(error)

# Python
found["signature"] = Chain.__call__.__signature__.parameters["shine"].default
found["docs"] = "shine: how much it shines" in Chain.__call__.__doc__
call = module.Call.of("a", num_steps=2, shine=1.5, seed=1)
request = read_request(by, call)
found["chain"] = request.shared.shine
found["python"] = refusal(lambda: read_request(by, module.Call.of("a", num_steps=2, shine=3)))

# Commands
for name, command in (
    ("generate", generate), ("client", serve_client), ("jax", jax_generate), ("batch", serve_batch)
):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options = ["--export_dir", "x"]
    needed = {"client": ["--server", "y"], "batch": ["--prompts", "p", "--out", "o"]}
    options += needed.get(name, [])
    found[name] = parser.parse_args([*options, "--shine", "1.5"]).shine
    found[name + " help"] = "how much it shines (default: 0.5)" in " ".join(
        parser.format_help().split()
    )

# HTTP and the page
schema = Body.model_json_schema()["properties"]["shine"]
found["schema"] = [schema["description"], schema["minimum"], schema["maximum"]]
body = json.dumps({"prompt": "a", "num_steps": 2, "shine": 1.5}).encode()
found["http"] = GenerateRequest.read(body, {}).jobs(by, "digest", 4, False)[0].call.shine
wrong = json.dumps({"prompt": "a", "num_steps": 2, "shine": 3}).encode()
asked = GenerateRequest.read(wrong, {})
found["http refusal"] = refusal(lambda: asked.jobs(by, "digest", 4, False))
strings = json.dumps({"prompt": "a", "shine": "much"}).encode()
found["http type"] = refusal(lambda: GenerateRequest.read(strings, {}))
(found["form"],) = [one for one in form_fields(by, {}, 4) if one["name"] == "shine"]

# Batch files
found["columns"] = "shine" in COLUMNS
settings = check_settings({"seed": 0, "num_steps": 2}, by)
entries = [{"prompt": "a", "shine": "1.5"}, {"prompt": "b"}, {"prompt": "c", "shine": "3"}]
rows, failures = check_rows(entries, settings, by)
found["rows"] = [row.call.shine for row in rows]
found["row refusal"] = failures[0].reason
import pyarrow.parquet
table = pyarrow.parquet.read_table(io.BytesIO(_table(Unit(0, (rows[0],)), [b""])))
found["table"] = table["shine"].to_pylist()

# PNG
with open(sys.argv[1], "wb") as file:
    file.write(png_bytes(np.zeros((8, 8, 3), "uint8"), metadata(request.shared, by)))
found["png"] = read_parameters(sys.argv[1])[0]["shine"]
print(json.dumps(found))
"""


def test_a_field_more_arrives_everywhere(tmp_path):
    """In the definition alone a parameter is added; nothing else is told of it."""
    result = subprocess.run(
        [sys.executable, "-c", EVERYWHERE, str(tmp_path / "a.png")],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    rule = "shine is a number from 0 to 2. Received: "
    assert found == {
        "signature": 0.5,
        "docs": True,
        "chain": 1.5,
        "python": rule + "3",
        **dict.fromkeys(("generate", "client", "jax", "batch"), 1.5),
        **{f"{name} help": True for name in ("generate", "client", "jax", "batch")},
        "schema": ["how much it shines", 0, 2],
        "http": 1.5,
        "http refusal": rule + "3.0",
        "http type": "shine: Input should be a valid number",
        "form": {
            "name": "shine",
            "kind": "number",
            "label": "Shine",
            "help": "how much it shines",
            "least": 0,
            "above": None,
            "most": 2,
            "slider": [0, 2, 0.1],
            "default": 0.5,
            "required": False,
            "goes_with": None,
            "per_model": False,
            "is_prompt": False,
        },
        "columns": True,
        "rows": [1.5, 0.5],
        "row refusal": rule + "3.0",
        "table": [1.5],
        "png": 1.5,
    }


def test_the_table_of_all_parameters_names_each():
    page = (ROOT / "docs" / "run.md").read_text(encoding="utf-8")
    table = page.partition("## The parameters of a call")[2].partition("## Sizes")[0]
    columns = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = re.findall(r"`(\w+)`", "".join(columns))
    assert named == [field.name for field in dataclasses.fields(Parameters) if field.name != "_"]
