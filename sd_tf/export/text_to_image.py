"""The pipeline as one SavedModel: prompts in, PNG files out.

The tokenizer runs as TensorFlow's operations, and so does the text encoder, unless the export has
it compiled. The loop and the decoder are compiled by XLA, and PNG files are encoded outside it, as
XLA has no strings.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from sd_tf.components import Spec
from sd_tf.components.build import Component
from sd_tf.config.rewrites import Rewrites
from sd_tf.export.modules import (
    TablesBySize,
    Traces,
    compiled,
    keep_variables,
    png_files,
    signed,
)
from sd_tf.export.tokenizer import GraphTokenizer
from sd_tf.runtime.adapter_places import ADAPTED
from sd_tf.runtime.call import Call
from sd_tf.runtime.manifest import Manifest
from sd_tf.runtime.request import time_ids_of
from sd_tf.runtime.reuse import reuse_input
from sd_tf.runtime.runner import NO_FURTHER_GUIDANCE, PLAIN
from sd_tf.runtime.shapes import Shape
from sd_tf.tokenizer.clip import ClipTokenizer
from sd_tf.tokenizer.tables import tables_of

GENERATE = "generate"


class TextToImageModule(tf.Module):
    """The signatures from prompts to PNG files, for every shape, compiled and plain."""

    def __init__(
        self,
        parts: Mapping[str, Component],
        tokenizers: Sequence[ClipTokenizer],
        manifest: Manifest,
        rewrites: Mapping[str, Rewrites],
    ):
        """Trace the signatures.

        Args:
            parts: the text encoder, the diffusion model and the decoder.
            tokenizers: one for each of the checkpoint's text encoders.
            rewrites: of each part.
        """
        super().__init__()
        for part in parts.values():
            keep_variables(self, part)
        loop = parts["diffusion_model"]
        self.tables = TablesBySize(loop)
        self.tokenizers = [
            GraphTokenizer(tables_of(one), one.max_length, manifest.prompt_chunks)
            for one in tokenizers
        ]
        self._parts, self._manifest, self._rewrites = parts, manifest, rewrites
        self._traces = Traces()
        self.endpoints = {}  # name → concrete function, the signatures of the SavedModel
        for shape in manifest.shapes.all:
            self._declare(shape)

    def _declare(self, shape: Shape) -> None:
        texts, seeds = Spec((shape.batch_size,), "string"), Spec((shape.batch_size,), "int32")
        generate_inputs = {
            "prompt": texts,
            "negative_prompt": texts,
            "num_steps": Spec((), "int32"),
            "unconditional_guidance_scale": Spec(),
            "seed": seeds,
            "scheduler": Spec((), "string"),
            **dict.fromkeys(self._manifest.further_scales, Spec()),
            **self._parts["diffusion_model"].places.inputs,
            **self._parts["diffusion_model"].reuse.inputs,
        }
        for prefix, is_compiled in (("", True), (PLAIN, False)):
            draw = self._drawing(shape, is_compiled)

            def generate(draw=draw, **inputs):
                number = self._number(inputs.pop("scheduler"))
                return draw(scheduler=number, **inputs)

            def default(prompt, draw=draw):
                return draw(prompt=prompt, **self._defaults(shape))

            name = prefix + self._manifest.shapes.signature("serving_default", shape)
            self.endpoints[name] = signed(default, {"prompt": texts})
            name = prefix + self._manifest.shapes.signature(GENERATE, shape)
            self.endpoints[name] = signed(generate, generate_inputs)

    def _drawing(self, shape: Shape, is_compiled: bool):
        """Return the function from a call's values to PNG files."""
        manifest = self._manifest

        def endpoint(part, name):
            tables = self.tables if part == "diffusion_model" else None
            found = self._parts[part].endpoints(shape, tables, self._traces.shared)[name]
            if is_compiled and (part != "text_encoder" or manifest.jit_compiled_text_encoder):
                return compiled(found.function, self._rewrites[part])
            return tf.function(found.function, autograph=False)

        adapted = self._parts["text_encoder"].places.inputs
        with_default, with_negative = (
            endpoint("text_encoder", name)
            for name in (ADAPTED if adapted else "serving_default", "encode")
        )
        seeded, decode = (
            endpoint("diffusion_model", "seeded"),
            endpoint("decoder", "serving_default"),
        )
        time_ids = self._time_ids(shape)

        def draw(prompt, num_steps, scheduler, negative_prompt=None, **inputs):
            checks = self.tables.checks(num_steps=num_steps, scheduler=scheduler)
            with tf.control_dependencies(checks):  # before anything else can fail
                prompt, num_steps, scheduler = map(tf.identity, (prompt, num_steps, scheduler))
            tokens = self._tokens(tf.ensure_shape(prompt, (shape.batch_size,)))
            adapters = {name: inputs[name] for name in adapted}
            if negative_prompt is None:
                conditions = with_default(tokens=tokens, **adapters)
            else:
                negative = self._tokens(tf.ensure_shape(negative_prompt, (shape.batch_size,)))
                conditions = with_negative(tokens=tokens, negative_tokens=negative, **adapters)
            run = {"num_steps": num_steps, "scheduler": scheduler, **inputs}
            latent = seeded(**conditions, **time_ids, **run)["latent"]
            return {"image_bytes": png_files(decode(latent=latent)["generated_images"])}

        return draw

    def _defaults(self, shape: Shape) -> dict[str, tf.Tensor]:
        """Return the values of a call that gives a prompt alone; picture i has the seed i."""
        manifest = self._manifest
        default = manifest.schedulers[manifest.default_sampler]
        call = Call("").completed(manifest)
        return {
            "num_steps": tf.constant(min(call.num_steps, default.most_steps)),
            "unconditional_guidance_scale": tf.constant(call.guidance_scale, "float32"),
            "seed": tf.range(shape.batch_size),
            "scheduler": tf.constant(default.number),
            **{
                name: tf.constant(NO_FURTHER_GUIDANCE[name], "float32")
                for name in manifest.further_scales
            },
            **self._parts["diffusion_model"].places.none(),
            **{name: tf.constant(x) for name, x in reuse_input(manifest.reuse, call.reuse).items()},
        }

    def _number(self, scheduler):
        """Return the number of a scheduler from its name."""
        names = self._manifest.samplers
        is_named = tf.equal(scheduler, tf.constant(names))
        rule = f"scheduler must be one of {', '.join(names)}. Received:"
        known = tf.debugging.Assert(tf.reduce_any(is_named), [rule, scheduler])
        with tf.control_dependencies([known]):
            place = tf.argmax(tf.cast(is_named, "int32"), output_type="int32")
        return tf.gather([self._manifest.scheduler_number(name) for name in names], place)

    def _tokens(self, texts):
        ids = [tokenize(texts) for tokenize in self.tokenizers]
        return ids[0] if len(ids) == 1 else tf.stack(ids, axis=1)

    def _time_ids(self, shape: Shape) -> dict[str, tf.Tensor]:
        """Return SDXL's size numbers, those of a call that gives none."""
        call = Call("", height=shape.height, width=shape.width)
        names = ("time_ids", "unconditional_time_ids")
        return {
            name: tf.constant(np.tile(ids, (shape.batch_size, 1)))
            for name, ids in zip(names, time_ids_of(self._manifest, call), strict=True)
            if ids is not None
        }
