"""What an export's options may be, beside each other and beside an export that is there."""

import dataclasses
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from sd_tf.components.conditions import conditions_of
from sd_tf.components.geometry import Fixed, geometry_of
from sd_tf.config import FAMILIES
from sd_tf.export import ExportOptions, embedded, export, verify
from sd_tf.export.options import check
from sd_tf.export.replacement import _mend, check_conditions, check_options
from sd_tf.runtime.adapter_places import AdapterPlaces
from sd_tf.runtime.call import Call
from sd_tf.runtime.manifest import ExportError, Manifest
from sd_tf.runtime.reuse import ReuseRecord
from sd_tf.weights import open_checkpoint
from tests import micro
from tests.exports import AS_WRITTEN, micro_decoder, micro_export, micro_folder
from tests.micro_adapters import lora

SIZE = {"batch_size": 2, "height": 16, "width": 16}

# Options beside each other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": 251}, r"max_steps is 1…250\. Received: 251"),
        ({"reuse": 21}, r"is 1…20: at most 20, and `max_steps`\. Received: 21"),
        ({"reuse": 5, "max_steps": 4}, r"is 1…4: .* Received: 5"),
        ({"adapter_rank": 4}, r"`adapter_rank` and .* give `adapter_slots`, too\. Received: 4, tr"),
        ({"adapter_layers": "all"}, r"give `adapter_slots`, too\. Received: 16, all"),
    ],
)
def test_choices_that_are_refused(options, message):
    with pytest.raises(ExportError, match=message):
        geometry_of(micro.CONFIG, Fixed(**options))


def test_the_components_hold_what_is_added(tmp_path):
    """An option of a component that is not exported would be ignored."""
    file = lora(tmp_path / "a.safetensors", 0, chosen=lambda part, layer: part == "unet")
    merged, small, previewing = (
        open_checkpoint(micro_folder(), **more)
        for more in (
            {"lora": [(file, 1.0)]},
            {"decoder": micro_decoder()},
            {"preview_decoder": micro_decoder()},
        )
    )
    for checkpoint, components, message in (
        (merged, ("decoder",), "a changes the diffusion_model: add it to .* Received: decoder"),
        (small, ("diffusion_model",), "A small decoder is the decoder: add it .*: diffusion_model"),
        (previewing, ("decoder",), "A small decoder is the preview_decoder: .*: decoder"),
        (small, ("decoder", "decoder"), r"component is given once\. Received: decoder, decoder"),
    ):
        with pytest.raises(ExportError, match=message):
            check(checkpoint, ExportOptions(components=components))
    for checkpoint, components in (
        (merged, ("diffusion_model",)),
        (small, ("decoder",)),
        (previewing, ("preview_decoder",)),
    ):
        assert check(checkpoint, ExportOptions(components=components))[1] == components
        assert components[0] in check(checkpoint, ExportOptions())[1]


# Options beside an export's own


def test_options_of_components_that_stay():
    there, kept = Manifest.read(micro_export()), ["text_encoder", "diffusion_model", "decoder"]

    def asked(*, kept=kept, there=there, **options):
        changes = {
            "max_steps": {"max_steps": 4},
            "reuse": {"reuse": ReuseRecord(4, 2, 8)},
            "adapter_slots": {"adapters": AdapterPlaces(2, 16)},
            "tile": {"tile": 128},
            "prompt_chunks": {"prompt_chunks": 2},
        }
        new = {name: value for one in options for name, value in changes[one].items()}
        given = ExportOptions(**options)
        check_options(given, dataclasses.replace(there, **new), there, kept)

    asked()
    for option, value, message in (
        ("max_steps", 4, r"`max_steps` would change .* decoder, which have 2: .* Received: 4"),
        ("reuse", 4, r"`reuse` would .* which have 1: leave it out, .* Received: 4"),
        ("prompt_chunks", 2, r"`prompt_chunks` would .* which have 1: .* Received: 2"),
        ("tile", 128, r"`tile` would .* which have 0: .* Received: 128"),
        ("adapter_slots", 2, r"`adapter_slots` .* have no places: .* 2 places of the rank 16 "),
    ):
        with pytest.raises(ExportError, match=message):
            asked(**{option: value})
    asked(max_steps=4, kept=["text_encoder", "decoder"])  # the new diffusion model's
    asked(prompt_chunks=2, kept=["diffusion_model", "decoder"])
    asked(max_steps=4, there=dataclasses.replace(there, max_steps=4))  # as it is there


def test_an_export_whose_prompts_have_other_chunks():
    """The message names the option that mends it."""
    checkpoint = open_checkpoint(micro_folder())
    two = geometry_of(checkpoint.config, Fixed(**{**SIZE, "prompt_chunks": 2}))
    for replaced, kept in (
        (["diffusion_model"], ["text_encoder"]),
        (["text_encoder"], ["diffusion_model"]),
    ):
        message = r"takes, \{'context': .*: give `prompt_chunks`=1, as the export has it\. Rec"
        with pytest.raises(ExportError, match=message):
            check_conditions(micro_export(), kept, replaced, checkpoint, two)


def test_an_export_whose_t5_reads_other_lengths():
    """SD3's context is CLIP's 77 tokens and T5's: with 512 of these it has 589, with 256 333."""
    config = FAMILIES["sd3-medium"]
    geometry = geometry_of(config, Fixed())
    checkpoint = SimpleNamespace(config=config, empty_text=lambda name: np.zeros((1, 512)))
    own = conditions_of(config, geometry, geometry.shapes.first).model["context"].shape
    there = {"context": (own[0], own[1] - 256, own[2])}
    for theirs, expected in (
        ({"context": own}, "give `max_sequence_length`=256, as the export has it"),
        ({"context": (own[0], own[1], 8)}, "replace both, or choose a checkpoint that fits"),
    ):
        assert _mend(there, theirs, checkpoint, geometry).startswith(expected)


def test_components_of_what_jax_compiled(tmp_path):
    folder = shutil.copytree(micro_export(), tmp_path / "compiled")
    for place in folder.glob("*/1"):
        shutil.rmtree(place)
    options = ExportOptions(**AS_WRITTEN, components=("decoder",), verify="off")
    with pytest.raises(ExportError, match=r"no SavedModels: it was compiled with JAX, where no co"):
        export(open_checkpoint(micro_folder()), folder, options)


def test_what_is_verified_without_guidance_has_no_negative_prompt(monkeypatch):
    """A call would refuse it."""
    manifest, drawn = dataclasses.replace(Manifest.read(micro_export()), guidance="none"), []

    def draw(*values, **parameters):
        drawn.append(Call(*values, **parameters).completed(manifest))
        return SimpleNamespace(images=None)

    monkeypatch.setattr(verify.Pipeline, "load", lambda folder, jit_compile: draw)
    (sample,) = verify.drawn(micro_export(), manifest, 1, "generate", "fast")
    assert drawn[0].negative_prompt == "" and set(sample.inputs["negative_prompt"]) == {""}


# Exports that are made on first use


def test_two_first_uses_at_a_time(tmp_path, monkeypatch):
    """The second one waits for the first one's export, and takes it."""
    monkeypatch.setattr(embedded, "FOLDER", tmp_path / "exports")
    made, is_made, said = threading.Event(), threading.Event(), []

    def make(checkpoint, folder, options):
        made.set()
        assert is_made.wait(60)
        shutil.copytree(micro_export(), folder)

    monkeypatch.setattr(embedded, "export", make)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(embedded.embedded_export, "tiny", said.append)
        assert made.wait(60)
        second = pool.submit(embedded.embedded_export, "tiny", said.append)
        time.sleep(0.2)
        assert not second.done()
        is_made.set()
        assert first.result() == second.result() == tmp_path / "exports" / "tiny"
    assert len([text for text in said if "once" in text]) == 1
