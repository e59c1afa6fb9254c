"""Draw with the models in training, without exporting them: slow, but enough to look at."""

import contextlib
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
from keras import ops

from sd_tf.components.build import component, tables_of
from sd_tf.components.geometry import Fixed, Geometry, geometry_of
from sd_tf.components.guidance import EDITED, IMAGE_SCALE, SCALE
from sd_tf.config import PipelineConfig
from sd_tf.models.branches import Branches, branches
from sd_tf.runtime.controls import image_input, inputs_of
from sd_tf.runtime.pictures import to_model
from sd_tf.training.conditions import Tokenize, same_time_ids

GUIDANCE = 4.0  # suits the embedded checkpoint


class Painter:
    """Draws with the given models, and the weights that they have when it is called."""

    def __init__(
        self,
        config: PipelineConfig,
        models: Mapping[str, keras.layers.Layer],
        tokenize: Tokenize,
        adapted: Branches | None = None,
    ):
        """Draw with the models; `adapted` are the branches of an adapter in training."""
        self.config, self.models, self.tokenize = config, models, tokenize
        self.adapted = {} if adapted is None else adapted

    def draw(
        self,
        prompts: Sequence[str],
        size: int | None = None,
        num_steps: int = 20,
        guidance_scale: float = GUIDANCE,
    ) -> np.ndarray:
        """Draw a picture for each prompt, uint8 (N, H, W, 3); picture i has seed i.

        `size` is in pixels; None: the size that the model was made for.
        """
        return self._pictures(prompts, num_steps, {SCALE: guidance_scale}, size, size)

    def edit(
        self,
        instructions: Sequence[str],
        pictures: np.ndarray,
        num_steps: int = 20,
        guidance_scale: float = 7.5,
        image_guidance_scale: float = 1.5,
    ) -> np.ndarray:
        """Edit each picture as its instruction says, uint8 (N, H, W, 3); picture i has seed i."""
        scales = {SCALE: guidance_scale, IMAGE_SCALE: image_guidance_scale}
        height, width = pictures.shape[1:3]
        return self._pictures(instructions, num_steps, scales, height, width, pictures)

    def steer(
        self,
        prompts: Sequence[str],
        pictures: np.ndarray,
        num_steps: int = 20,
        guidance_scale: float = GUIDANCE,
    ) -> np.ndarray:
        """Draw for each prompt what the ControlNet makes of its picture, uint8 (N, H, W, 3)."""
        height, width = pictures.shape[1:3]
        scales = {SCALE: guidance_scale}
        return self._pictures(prompts, num_steps, scales, height, width, steering=pictures)

    def _pictures(self, prompts, num_steps, scales, height, width, edited=None, steering=None):
        with branches(self.adapted):
            return self._drawn(prompts, num_steps, scales, height, width, edited, steering)

    def _drawn(self, prompts, num_steps, scales, height, width, edited, steering) -> np.ndarray:
        fixed = Fixed(batch_size=len(prompts), height=height, width=width, max_steps=num_steps)
        geometry = geometry_of(self.config, fixed)
        empty_tokens = self.tokenize([""])

        def run(name, endpoint="serving_default", **inputs):
            part = component(name, self.config, geometry, "float32", empty_tokens, self._model)
            return part.endpoints(geometry.shapes.first)[endpoint].function(**inputs)

        tokens = {name: ops.convert_to_tensor(x) for name, x in self.tokenize(prompts).items()}
        inputs = run("text_encoder", **tokens)
        inputs |= {name: ops.convert_to_tensor(x, "float32") for name, x in scales.items()}
        ids = same_time_ids(self.config, *geometry.shapes.first.size)
        if ids is not None:
            ids = ops.convert_to_tensor(np.repeat(ids, len(prompts), axis=0))
            inputs |= {"time_ids": ids, "unconditional_time_ids": ids}
        if edited is not None:
            images = ops.convert_to_tensor(to_model(edited))
            inputs[EDITED] = run("image_encoder", images=images)["latent"]
        inputs["num_steps"] = ops.convert_to_tensor(num_steps, "int32")
        endpoint = "serving_default"
        if steering is not None:
            endpoint, further = "seeded", self._steered(steering, geometry)
            inputs |= {name: ops.convert_to_tensor(x) for name, x in further.items()}
        with _loops_in_python(True):
            latent = run("diffusion_model", endpoint, **inputs)["latent"]
        return ops.convert_to_numpy(run("decoder", latent=latent)["generated_images"])

    def _steered(self, pictures: np.ndarray, geometry: Geometry) -> dict[str, np.ndarray]:
        """Return the further inputs of a loop that the one ControlNet steers in all its steps."""
        tables = tables_of(self.config, geometry.shapes.first.size, geometry.max_steps)
        return {
            image_input(0): pictures / np.float32(255),
            **inputs_of([1.0], [(0, len(tables.rows))], guesses=False),
            "scheduler": np.int32(tables.numbers[self.config.schedule.sampler]),
            "seed": np.arange(len(pictures), dtype="int32"),
        }

    def _model(self, name: str, precision: str, storage: str | None) -> Callable:
        """Fetch a model as it is, in the precision that it is trained in."""
        model = self.models[name]

        def run(*inputs, **named):
            with _loops_in_python(False):
                return model(*inputs, **named)

        return run if name == self.config.denoiser.component else model


@contextlib.contextmanager
def _loops_in_python(wanted: bool):
    """Keep JAX from compiling the loop, which would hold the weights as constants; TensorFlow's
    loop runs in Python anyway. Without loops, JAX's own operations stay compiled, which is faster.
    """
    if keras.backend.backend() != "jax":
        yield
        return
    import jax

    with jax.disable_jit(wanted):
        yield
