"""diffusers' transformer on our inputs: PyTorch eager, torch.compile, or converted by OpenVINO."""

from pathlib import Path

import diffusers
import numpy as np
import torch
from diffusers import FluxPipeline

from sd_tf.bench.peers import inputs as npz
from sd_tf.bench.peers.engine import CALL, Job, Loaded, Stage
from sd_tf.bench.plan import BenchError
from sd_tf.bench.timing import timed
from sd_tf.files.objects import read_object


def load(job: Job) -> Loaded:
    torch.set_num_threads(job.threads)
    model, arguments = _model(job)
    if job.engine == "openvino":
        return _on_openvino(model, arguments, job)
    if job.engine == "torch_compile":
        model = torch.compile(model, dynamic=False)

    @torch.inference_mode()
    def run():
        return model(*arguments.values()).float().numpy()

    return Loaded({CALL: Stage(run, lambda output: output)}, None)


def _model(job: Job) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return the module, whose latents are channels last, and what it is called with."""
    given = npz.read(job.inputs)
    given["context"] = np.repeat(given["context"], given.pop("counts"), axis=1)
    described = read_object(Path(job.checkpoint) / "transformer" / "config.json", BenchError)
    transformer = getattr(diffusers, described["_class_name"]).from_pretrained(
        job.checkpoint, subfolder="transformer", torch_dtype=getattr(torch, job.precision)
    )
    wrapper = Flux if described["_class_name"].startswith("Flux") else SD3
    arguments = {
        name: torch.from_numpy(value).to(
            torch.float32 if name == "timesteps" else transformer.dtype
        )
        for name, value in given.items()
    }
    return wrapper(transformer).eval(), arguments


class SD3(torch.nn.Module):
    def __init__(self, transformer):
        super().__init__()
        self.transformer = transformer

    def forward(self, latents, timesteps, context, pooled):
        latents = latents.permute(0, 3, 1, 2)
        output = self.transformer(latents, context, pooled, timesteps, return_dict=False)[0]
        return output.permute(0, 2, 3, 1)


class Flux(torch.nn.Module):
    def __init__(self, transformer):
        super().__init__()
        self.transformer = transformer

    def forward(self, latents, timesteps, context, pooled, guidance=None):
        latents = latents.permute(0, 3, 1, 2)
        _, _, height, width = latents.shape
        ids = (latents.device, latents.dtype)
        output = self.transformer(
            FluxPipeline._pack_latents(latents, *latents.shape),
            encoder_hidden_states=context,
            pooled_projections=pooled,
            timestep=(timesteps / 1000).to(latents.dtype),
            guidance=guidance,
            img_ids=FluxPipeline._prepare_latent_image_ids(1, height // 2, width // 2, *ids),
            txt_ids=torch.zeros(context.shape[1], 3, dtype=latents.dtype),
            return_dict=False,
        )[0]
        output = FluxPipeline._unpack_latents(output, height * 8, width * 8, 8)
        return output.permute(0, 2, 3, 1)


def _on_openvino(model, arguments: dict[str, torch.Tensor], job: Job) -> Loaded:
    import openvino
    from openvino.preprocess import PrePostProcessor

    from sd_tf.bench.peers.engines.openvino_ir import settings_for

    inputs = [value.float().numpy() for value in arguments.values()]

    def compiled():
        with torch.no_grad():
            converted = openvino.convert_model(model, example_input=tuple(arguments.values()))
        converted.reshape(dict(enumerate(value.shape for value in inputs)))
        outside = PrePostProcessor(converted)  # NumPy has no bfloat16
        for place in (*map(outside.input, range(len(inputs))), outside.output(0)):
            place.tensor().set_element_type(openvino.Type.f32)
        return openvino.Core().compile_model(outside.build(), "CPU", settings_for(job))

    call, seconds = timed(compiled)
    return Loaded(
        {CALL: Stage(lambda: call(inputs)[0], lambda output: output)}, None, compile_seconds=seconds
    )
