"""Check a call against an export, and complete it with an entry for each picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sd_tf.runtime.adapter_places import ADAPTER_SCALES, AdapterPlaces
from sd_tf.runtime.call import Call
from sd_tf.runtime.capabilities import EDIT, PAINT, use_of_picture
from sd_tf.runtime.controls import calls_of, inputs_of
from sd_tf.runtime.image_prompts import ImagePrompts, scales_input
from sd_tf.runtime.manifest import Manifest
from sd_tf.runtime.shapes import Shape, Size
from sd_tf.sampling.tables import start_row

# SDXL's refiner is conditioned on how beautiful a picture is to be.
AESTHETIC_SCORE, NEGATIVE_AESTHETIC_SCORE = 6.0, 2.5


@dataclass(frozen=True)
class Request:
    """A call's pictures, and what runners need to know beside the values of the parameters."""

    each: Sequence[Call]  # one for each picture
    scheduler: int  # its number, as signatures take it
    model_calls: int  # for all steps
    start: int  # the first model call that is made
    time_ids: np.ndarray | None  # SDXL's size numbers
    negative_time_ids: np.ndarray | None
    adapters: Mapping[str, np.ndarray]  # the models' further input; none without places
    controls: Mapping[str, np.ndarray]  # the loop's inputs for ControlNets, but their pictures
    image_prompts: Mapping[str, np.ndarray]  # its inputs for IP-Adapters, but the tokens

    @property
    def shared(self) -> Call:
        """The first picture's call, for the values that all pictures share."""
        return self.each[0]

    @property
    def size(self) -> Size:
        """The pictures' height and width."""
        return self.shared.height, self.shared.width

    def shape(self, chunk: range) -> Shape:
        """Return the shape that makes a chunk."""
        return Shape(len(chunk), *self.size)

    def chunk(self, name: str, chunk: range) -> list:
        """Return a parameter's values for a chunk; beyond the last picture its value repeats."""
        return [getattr(self.each[min(i, len(self.each) - 1)], name) for i in chunk]


def read_request(manifest: Manifest, call: Call) -> Request:
    """Check and complete a call; CallError or ExportError where the export cannot do it."""
    each = call.completed(manifest).divided()
    shared = each[0]
    start = 0
    if shared.image is not None and use_of_picture(manifest) != EDIT:
        start = start_row(shared.scheduler, shared.num_steps, shared.strength)
    time_ids, negative_time_ids = time_ids_of(manifest, shared)
    calls = manifest.model_calls(shared.scheduler, shared.num_steps)
    return Request(
        each=each,
        scheduler=manifest.scheduler_number(shared.scheduler),
        model_calls=calls,
        start=start,
        time_ids=time_ids,
        negative_time_ids=negative_time_ids,
        adapters=adapter_inputs(
            manifest.adapters, {} if shared.adapters is None else shared.adapters
        ),
        controls=_controls(manifest, shared, start, calls),
        image_prompts=_image_prompts(manifest.image_prompts, shared),
    )


def _controls(manifest: Manifest, call: Call, first: int, calls: int) -> dict[str, np.ndarray]:
    """Return the inputs for ControlNets, but their pictures; a net without a picture is off."""
    if not manifest.controls:
        return {}
    if call.control_image is None:
        off = [0.0] * len(manifest.controls)
        return inputs_of(off, [(0, 0)] * len(off), guesses=False)
    scales = [
        0.0 if picture is None else scale
        for picture, scale in zip(call.control_image, call.control_scale, strict=True)
    ]
    shares = [
        calls_of(start, end, first, calls)
        for start, end in zip(call.control_start, call.control_end, strict=True)
    ]
    guesses = call.control_guess or _first_pools(manifest, scales)
    run = [
        scale if first < stop else 0.0 for scale, (first, stop) in zip(scales, shares, strict=True)
    ]
    return inputs_of(run, shares, guesses)


def _first_pools(manifest: Manifest, scales: Sequence[float]) -> bool:
    """Whether the first net that is on has all guess because it pools, as in diffusers.

    Its pipeline that paints with SDXL does not ask.
    """
    if manifest.time_ids and use_of_picture(manifest) == PAINT:
        return False
    on = [net for net, scale in zip(manifest.controls, scales, strict=True) if scale]
    return bool(on) and on[0].pools


def _image_prompts(prompts: ImagePrompts, call: Call) -> dict[str, np.ndarray]:
    """Return the scale of each IP-Adapter, 0 for one without a picture."""
    if call.image_prompt is None:
        return scales_input(prompts, [0.0] * len(prompts.adapters))
    scales = [
        0.0 if pictures is None else scale
        for pictures, scale in zip(call.image_prompt, call.image_prompt_scale, strict=True)
    ]
    return scales_input(prompts, scales)


def adapter_inputs(places: AdapterPlaces, adapters: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Return the scale of each slot for a call's adapters, as the models take it."""
    if not places.slots:
        return {}
    scales = np.zeros(places.slots, "float32")
    for name, scale in adapters.items():
        scales[places.loaded[name].slot] = scale
    return {ADAPTER_SCALES: scales}


def time_ids_of(manifest: Manifest, call: Call) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return SDXL's size numbers for the prompt and for the negative prompt."""
    if not manifest.time_ids:
        return None, None
    size = (call.height, call.width)
    corner = (0, 0) if call.crop_top_left is None else call.crop_top_left
    ids = [*(size if call.original_size is None else call.original_size), *corner]
    if manifest.time_ids == 5:
        both = [*ids, AESTHETIC_SCORE], [*ids, NEGATIVE_AESTHETIC_SCORE]
    else:
        ids += size if call.target_size is None else call.target_size
        both = ids, ids
    return tuple(np.array(numbers, "float32") for numbers in both)
