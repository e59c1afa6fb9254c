"""ControlNets in the loop: their inputs, and what they add to the denoiser's feature maps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from keras import ops

from sd_tf.components.spec import Spec
from sd_tf.runtime.controls import FIRST, GUESS, PER_NET, SCALES, STOP, image_input
from sd_tf.runtime.shapes import Shape

CONTROL = "control"  # the denoiser's argument


@dataclass(frozen=True, eq=False)
class Controls:
    """The nets of a loop, in the order of their inputs."""

    nets: Sequence = ()  # of `models.controlnet.ControlNet`

    def inputs(self, shape: Shape) -> dict[str, Spec]:
        """The loop's further inputs for pictures of a shape; none without nets. Zeros run none."""
        if not self.nets:
            return {}
        count = len(self.nets)
        picture = Spec((shape.batch_size, shape.height, shape.width, 3))
        dtypes = {SCALES: "float32", FIRST: "int32", STOP: "int32"}
        return {
            **{image_input(number): picture for number in range(count)},
            **{name: Spec((count,), dtypes[name]) for name in PER_NET},
            GUESS: Spec(dtype="bool"),
        }

    def running(self, shared, parts: Sequence[bool]) -> "RunningControls":
        """Return the nets with traces of their own.

        Args:
            shared: see `as_is`.
            parts: for each part of the denoiser's batch, whether it has the prompt.
        """
        nets = [(net, shared(net.hint, True), shared(net, True)) for net in self.nets]
        return RunningControls(nets, parts)


@dataclass(frozen=True, eq=False)
class RunningControls:
    """Computes what nets add, for the parts of the denoiser's batch."""

    nets: Sequence[tuple]  # each net, and its two functions
    parts: Sequence[bool]

    def hints(self, inputs: Mapping) -> list:
        """Embed the pictures of the nets that a call uses, which no step changes."""
        hints = []
        for number, (net, embed, _) in enumerate(self.nets):
            pictures = inputs[image_input(number)]
            batch, height, width, _ = pictures.shape
            side = net.control.downscale
            shape = (batch, height // side, width // side, net.config.channels[0])
            hint = ops.cond(
                inputs[SCALES][number] != 0.0,
                partial(embed, pictures),
                partial(ops.zeros, shape, net.compute_dtype),
            )
            hints.append(ops.concatenate([hint] * len(self.parts), axis=0))
        return hints

    def added(self, x, timesteps, conditions: Mapping, hints: Sequence, call, inputs: Mapping):
        """Return the sum of what the nets that run in this model call add to each feature map.

        Args:
            x: the noisy latents of all parts, without what stands beside them.
            timesteps: one for each row of x; `conditions`: the denoiser's, by name.
            call: the model call's number.
        """
        sum_ = None
        for number, ((net, _, run), hint) in enumerate(zip(self.nets, hints, strict=True)):
            if sum_ is None:
                shapes = net.shapes(x.shape)
                sum_ = [ops.zeros(shape, net.compute_dtype) for shape in shapes]
            scale = inputs[SCALES][number]
            share = inputs[FIRST][number] <= call, call < inputs[STOP][number]
            runs = ops.logical_and(scale != 0.0, ops.logical_and(*share))

            def more(net=net, run=run, hint=hint, scale=scale, before=sum_):
                maps = run(x, timesteps, hint=hint, **conditions)
                scaled = self._scaled(maps, net, scale, inputs[GUESS])
                return [own + one for own, one in zip(before, scaled, strict=True)]

            sum_ = ops.cond(runs, more, partial(list, sum_))
        return sum_

    def _scaled(self, maps: Sequence, net, scale, guesses) -> list:
        """Scale a net's maps: when it guesses, the deeper the more, and for the prompt alone."""
        last = len(maps) - 1
        batch = maps[0].shape[0] // len(self.parts)
        has_prompt = [float(part) for part in self.parts for _ in range(batch)]
        rows = ops.reshape(ops.convert_to_tensor(has_prompt, "float32"), (-1, 1, 1, 1))
        scaled = []
        for depth, each in enumerate(maps):
            deep = 1.0 if net.control.pools else 10.0 ** (depth / last - 1.0)
            factor = scale * ops.where(guesses, rows * deep, 1.0)
            each = each * ops.cast(factor, each.dtype)
            if net.control.pools:
                pooled = ops.mean(each, axis=(1, 2), keepdims=True)
                each = ops.broadcast_to(pooled, each.shape)
            scaled.append(each)
        return scaled
