"""The whole diffusion loop: sampler, guidance and denoiser, from noise or a picture to latents."""

from functools import partial

import numpy as np
from keras import ops

from sd_tf.components.conditions import Conditions
from sd_tf.components.controls import CONTROL, Controls
from sd_tf.components.guidance import SCALE, Guidance
from sd_tf.components.image_prompts import PICTURES, LoopImagePrompts
from sd_tf.components.places import KERNELS, Places
from sd_tf.components.reuse import LoopReuse
from sd_tf.components.spec import Endpoint, Spec, as_is
from sd_tf.runtime.reuse import FEATURES, REUSE
from sd_tf.runtime.shapes import Shape, Shapes
from sd_tf.sampling import noise as noise_source
from sd_tf.sampling.loop import denoise, empty_history
from sd_tf.sampling.rows import HISTORY


class DiffusionModel:
    """The loop around a denoiser. `endpoints` lists what can be called and with which inputs.

    Inputs that every call of the loop shares are passed on by name: `num_steps`, `scheduler` (its
    number), the guidance's scales, the conditions, the adapters' scales where there are places for
    adapters, the control pictures and what goes with them where there are ControlNets, the tokens
    of pictures that are prompts where there are IP-Adapters, and how often deep features are
    computed anew where they may be reused.
    """

    def __init__(
        self,
        # (x, timesteps, **conditions) → its prediction; also `KERNELS`, `CONTROL`, `PICTURES`,
        # `FEATURES`
        denoiser,
        tables,  # the fields of `sampling.packed.Packed`, as the backend's arrays
        conditions: Conditions,
        guidance: Guidance,
        places: Places,
        controls: Controls,
        images: LoopImagePrompts,
        reuse: LoopReuse,
        shape: Shape,
        shapes: Shapes,  # all of the export's
        default_scheduler: int,
        tells_guidance: bool = False,  # the denoiser takes the guidance scale
        skipping=None,  # the denoiser without the blocks of skip-layer guidance
        shared=as_is,
    ):
        self.denoiser = shared(denoiser, open_batch=True, fixed=(KERNELS,))
        self.skipping = None
        if skipping is not None:
            self.skipping = shared(skipping, open_batch=True, fixed=(KERNELS,))
        self.tables, self.places = tables, places
        self._merged = shared(places.merged)
        self.conditions, self.guidance = conditions, guidance
        self.batch_size, self.latent_shape = shape.batch_size, shapes.latent(shape.size)
        parts = [part.prompt for part in guidance.parts]
        self.controls = controls.running(shared, parts)
        self._control_inputs = controls.inputs(shape)
        self._keys = partial(images.keys, parts=guidance.parts, shared=shared)
        self._image_inputs = images.inputs(shape)
        self.reuse, self._kept = reuse, reuse.state(shape, shapes)
        if reuse.keeping is not None:
            self.keeping = shared(reuse.keeping, open_batch=True, fixed=(KERNELS,))
        self.default_scheduler = default_scheduler
        self.tells_guidance = tells_guidance
        self._shared_walk = shared(self._walk)

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        latents = Spec((self.batch_size, *self.latent_shape))
        history = Spec((HISTORY, *latents.shape))
        scalar, seeds = Spec(dtype="int32"), Spec((self.batch_size,), "int32")
        call = {**self.conditions.inputs, "num_steps": scalar, **self.guidance.inputs}
        further = {**self.guidance.further_inputs, **self.places.inputs, **self._neutral}
        chosen = {**call, "scheduler": scalar, **further}
        state = {"latent": latents, "history": history, **self._kept}
        bounds = {"first": scalar, "start": scalar, "stop": scalar}
        steps = {"scheduler": scalar, "num_steps": scalar}
        image = {"noise": latents, "image_latent": latents, "start": scalar, **steps}
        return {
            "serving_default": Endpoint(self.default, call),
            "seeded": Endpoint(self.seeded, {**chosen, "seed": seeds}),
            "from_noise": Endpoint(self.from_noise, {**chosen, "noise": latents}),
            "segment": Endpoint(self.segment, {**chosen, **state, **bounds, "seed": seeds}),
            # How a segment's first state is made: from unit noise or from a picture.
            "noise": Endpoint(self.noise, {"seed": seeds}, compiled=False),
            "begin": Endpoint(self.begin, {"noise": latents, **steps}, compiled=False),
            "begin_image": Endpoint(self.begin_image, image, compiled=False),
        }

    # Whole runs

    def default(self, **inputs):
        """Draw with the default scheduler, without adapters; picture i has the seed i."""
        scheduler = ops.convert_to_tensor(self.default_scheduler, "int32")
        none = {name: ops.zeros(s.shape, s.dtype) for name, s in self._neutral.items()}
        further = {**self.guidance.without_extra(), **self.places.none(), **none}
        return self.seeded(self._default_seeds, scheduler=scheduler, **further, **inputs)

    def seeded(self, seed, **inputs):
        return self._whole_run(self.noise(seed)["noise"], seed, **inputs)

    def from_noise(self, noise, **inputs):
        """Draw from the given unit noise; samplers that add noise take it from seed i."""
        return self._whole_run(noise, self._default_seeds, **inputs)

    def _whole_run(self, unit_noise, seeds, num_steps, scheduler, **inputs):
        x = unit_noise * self._of_run(self.tables.scales, scheduler, num_steps)
        stop = self._of_run(self.tables.calls, scheduler, num_steps)
        zero = ops.convert_to_tensor(0, "int32")
        kept = [ops.zeros(spec.shape, spec.dtype) for spec in self._kept.values()]
        state = [x, empty_history(x), *kept]
        x, *_ = self._run(state, zero, zero, stop, seeds, scheduler, num_steps, inputs)
        return {"latent": x}

    # Runs in segments

    def noise(self, seed):
        return {"noise": noise_source.normal(seed, noise_source.INITIAL, self.latent_shape)}

    def begin(self, noise, scheduler, num_steps):
        return {"latent": noise * self._of_run(self.tables.scales, scheduler, num_steps)}

    def begin_image(self, noise, image_latent, start, scheduler, num_steps):
        row = self._of_run(self.tables.starts, scheduler, num_steps) + start
        signal, sigma = ops.take(self.tables.signals, row), ops.take(self.tables.sigmas, row)
        return {"latent": signal * image_latent + sigma * noise}

    def segment(self, latent, history, first, start, stop, seed, scheduler, num_steps, **inputs):
        """Walk the rows [start, stop) of a run that began at row `first`."""
        state = [latent, history, *(inputs[name] for name in self._kept)]
        after = self._run(state, first, start, stop, seed, scheduler, num_steps, inputs)
        return dict(zip(("latent", "history", *self._kept), after, strict=True))

    # The loop

    def _run(self, state, first, start, stop, seeds, scheduler, num_steps, inputs):
        scales = {name: inputs[name] for name in self.guidance.scales}
        scales |= {name: inputs[name] for name in self.guidance.further_inputs}
        conditions = {name: inputs[name] for name in self.conditions.inputs}
        adapters = {name: inputs[name] for name in self.places.inputs}
        control = {name: inputs[name] for name in self._control_inputs}
        images = {name: inputs[name] for name in self._image_inputs}
        reuse = {name: inputs[name] for name in self.reuse.inputs}
        given = scales, conditions, adapters, control, images, reuse
        return self._shared_walk(state, first, start, stop, seeds, scheduler, num_steps, *given)

    def _walk(self, state, first, start, stop, seeds, scheduler, num_steps, *given):
        """Walk with the values that all model calls share: see `_predictor`."""
        x, past, *kept = state
        offset = self._of_run(self.tables.starts, scheduler, num_steps)

        def rows(i, variant):
            return ops.take(ops.take(self.tables.rows, offset + i, axis=0), variant, axis=0)

        calls = self._of_run(self.tables.calls, scheduler, num_steps)
        predict = self._predictor(*given, first, calls)
        return denoise(predict, rows, x, past, kept, first, start, ops.minimum(stop, calls), seeds)

    def _predictor(self, scales, conditions, adapters, control, images, reuse, first, calls):
        """Return (x, timestep, call, *kept) → the guided output, and what is kept after the call.

        What all calls share is computed here.
        """
        guidance, names = self.guidance, self.conditions.names
        shared = {}
        if adapters:
            shared[KERNELS] = self._merged(**adapters)
        given = guidance.conditions(conditions, names)
        beside = guidance.beside(conditions, self.conditions.beside)
        own_scales = tuple(scales[name] for name in guidance.scales)
        hints, keys = self.controls.hints(control), self._keys(images)

        def run(denoiser, x, timestep, given):
            batch = x.shape[0]
            if self.tells_guidance:
                given = {**given, "guidance": ops.broadcast_to(scales[SCALE], (batch,))}
            return denoiser(x, ops.broadcast_to(timestep, (batch,)), **given, **shared)

        seen = given if keys is None else {**given, PICTURES: keys}

        def with_control(denoiser, x, timestep, call):
            """Return the output with what the nets add, and that: they see x alone."""
            if not hints:
                return run(denoiser, x, timestep, seen), None
            noisy = x[..., : self.latent_shape[-1]]
            timesteps = ops.broadcast_to(timestep, (x.shape[0],))
            added = self.controls.added(noisy, timesteps, given, hints, call, control)
            return run(denoiser, x, timestep, {**seen, CONTROL: added}), added

        def output_of(x, timestep, call, *kept):
            if not kept:
                return [with_control(self.denoiser, x, timestep, call)[0]]

            def shallow(features, added):
                own = {} if added is None else {CONTROL: added}
                return run(self.denoiser, x, timestep, {**seen, **own, FEATURES: features})

            whole = partial(with_control, self.keeping, x, timestep, call)
            is_fresh = ops.equal(ops.mod(call - first, ops.maximum(reuse[REUSE], 1)), 0)
            return self.reuse.predict(is_fresh, whole, shallow, *kept)

        def predict(x, timestep, call, *kept):
            more = None
            if guidance.extra is not None:
                more = partial(self._with_extra, run, conditions, scales, timestep, call, calls)
            output, *kept = output_of(guidance.expanded(x, beside), timestep, call, *kept)
            return guidance.guided(x, output, own_scales, more), *kept

        return predict

    def _with_extra(self, run, conditions, scales, timestep, call, calls, x, output, own):
        """Add the further prediction in the calls that want it; others do not compute it."""
        extra = self.guidance.extra
        scale = scales[extra.scale]
        given = {name: conditions[extra.part.prefix + name] for name in self.conditions.names}
        denoiser = self.skipping if extra.skips else self.denoiser

        def combined():
            more = ops.cast(run(denoiser, x, timestep, given), "float32")
            return extra.combine(output, own, more, scale)

        own_scales = (scales[name] for name in self.guidance.scales)
        return ops.cond(extra.is_wanted(call, calls, scale, *own_scales), combined, lambda: output)

    @property
    def _neutral(self) -> dict[str, Spec]:
        """The further inputs whose zeros change nothing."""
        return {**self._control_inputs, **self._image_inputs, **self.reuse.inputs}

    @property
    def _default_seeds(self):
        return np.arange(self.batch_size, dtype="int32")

    @staticmethod
    def _of_run(table, scheduler, num_steps):
        return ops.take(ops.take(table, scheduler, axis=0), num_steps - 1, axis=0)
