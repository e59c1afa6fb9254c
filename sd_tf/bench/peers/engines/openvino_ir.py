"""diffusers' models, converted and compiled by OpenVINO and driven by `walk`."""

from pathlib import Path

import numpy as np
import openvino

from sd_tf.bench.peers import inputs as npz
from sd_tf.bench.peers.agreement import guided, pixels
from sd_tf.bench.peers.engine import Job, Loaded, Stage
from sd_tf.bench.peers.walk import walk
from sd_tf.bench.timing import timed

TEXT_ENCODER, UNET, DECODER = "text_encoder", "unet", "decoder"
HINTS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def convert(checkpoint: Path, folder: Path) -> None:
    """Convert the models, for any size, in a process of its own, which frees PyTorch's memory."""
    import torch

    folder.mkdir(parents=True)
    with torch.no_grad():
        for name, (module, example) in _torch_parts(checkpoint).items():
            model = openvino.convert_model(module.eval(), example_input=example)
            openvino.save_model(model, folder / f"{name}.xml", compress_to_fp16=False)


def _torch_parts(checkpoint: Path) -> dict:
    import diffusers
    import torch

    pipe = diffusers.StableDiffusionPipeline.from_pretrained(checkpoint, safety_checker=None)

    class TextEncoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = pipe.text_encoder

        def forward(self, tokens):
            return self.model(tokens)[0]

    class UNet(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = pipe.unet

        def forward(self, sample, timestep, context):
            return self.model(sample, timestep, context, return_dict=False)[0]

    class Decoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = pipe.vae

        def forward(self, latent):
            latent = latent / self.model.config.scaling_factor
            return self.model.decode(latent, return_dict=False)[0]

    size = pipe.unet.config.sample_size
    sample = torch.zeros(2, 4, size, size)
    context = torch.zeros(2, 77, pipe.unet.config.cross_attention_dim)
    return {
        TEXT_ENCODER: (TextEncoder(), torch.zeros(2, 77, dtype=torch.int64)),
        UNET: (UNet(), (sample, torch.tensor(1), context)),
        DECODER: (Decoder(), sample[:1]),
    }


def settings_for(job: Job) -> dict:
    """Return the settings of OpenVINO; without a hint, a CPU with bfloat16 computes in it."""
    hint = {} if job.kind.chooses_precision else {"INFERENCE_PRECISION_HINT": HINTS[job.precision]}
    return {**hint, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": job.threads}


def precision_of(model: openvino.CompiledModel) -> str:
    """Return the precision that a compiled model computes in."""
    hint = model.get_property("INFERENCE_PRECISION_HINT").to_string()
    return {short: name for name, short in HINTS.items()}.get(hint, hint)


def load(job: Job) -> Loaded:
    core, settings = openvino.Core(), settings_for(job)
    given = npz.read(job.inputs)
    batch, height, width, channels = given["noise"].shape
    shapes = {
        TEXT_ENCODER: [given["tokens"].shape],
        UNET: [(2 * batch, channels, height, width), (), given["context"].shape],
        DECODER: [(batch, channels, height, width)],
    }
    models = {name: core.read_model(Path(job.ir_dir) / f"{name}.xml") for name in shapes}
    for name, model in models.items():
        model.reshape(dict(enumerate(shapes[name])))

    def compiled(model):
        return core.compile_model(model, "CPU", settings)

    parts, seconds = timed(lambda: {name: compiled(model) for name, model in models.items()})
    models.clear()

    def encode(tokens):
        return parts[TEXT_ENCODER]([tokens.astype("int64")])[0]

    def unet(sample, timestep, context):
        sample = np.moveaxis(sample, -1, 1).astype("float32")
        result = parts[UNET]([sample, np.array(int(timestep)), context])[0]
        return np.moveaxis(result, 1, -1)

    def decode(latent):
        return pixels(np.moveaxis(parts[DECODER]([np.moveaxis(latent, -1, 1)])[0], 1, -1))

    pair, timestep = npz.pair(given["noise"]), given["rows"][0, 0]
    return Loaded(
        {
            "text_encoder": Stage(lambda: encode(given["tokens"]), lambda context: context),
            "unet_step": Stage(lambda: unet(pair, timestep, given["context"]), guided),
            "decoder": Stage(lambda: decode(given["latent"]), lambda images: images),
        },
        lambda steps: walk(given, steps, encode, unet, decode),
        compile_seconds=seconds,
        precision=precision_of(parts[UNET]) if job.kind.chooses_precision else None,
    )
