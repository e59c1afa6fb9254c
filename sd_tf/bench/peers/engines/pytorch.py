"""diffusers' pipeline, eager or with its UNet and decoder compiled."""

import time

import diffusers
import numpy as np
import torch

from sd_tf.bench.peers import inputs as npz
from sd_tf.bench.peers.agreement import guided, pixels
from sd_tf.bench.peers.engine import GUIDANCE, NEGATIVE, PROMPT, Job, Loaded, Stage

DEVICES = {"cpu": "cpu", "gpu": "cuda"}


def load(job: Job) -> Loaded:
    torch.set_num_threads(job.threads)
    job.check_device("PyTorch", torch.cuda.is_available())
    dtype, device = getattr(torch, job.precision), DEVICES[job.device]
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(
        job.checkpoint, safety_checker=None
    ).to(device, dtype)
    pipe.scheduler = diffusers.DDIMScheduler.from_config(pipe.scheduler.config)
    pipe.set_progress_bar_config(disable=True)
    pipe.unet.to(memory_format=torch.channels_last)
    pipe.vae.to(memory_format=torch.channels_last)
    if job.engine == "torch_compile":
        pipe.unet = torch.compile(pipe.unet, dynamic=False)
        pipe.vae.decode = torch.compile(pipe.vae.decode, dynamic=False)

    @torch.inference_mode()
    def draw(steps):
        ends = []

        def note(pipe, step, timestep, tensors):
            synchronize(device)
            ends.append(time.perf_counter())
            return tensors

        pipe(
            PROMPT,
            negative_prompt=NEGATIVE,
            height=job.height,
            width=job.width,
            num_inference_steps=steps,
            guidance_scale=GUIDANCE,
            num_images_per_prompt=job.batch_size,
            generator=torch.Generator().manual_seed(0),
            callback_on_step_end=note,
        )
        return (ends[-1] - ends[0]) / (len(ends) - 1)

    return Loaded(
        _stages(pipe, job, dtype, device),
        draw,
        device_memory=lambda: torch.cuda.max_memory_allocated() if device == "cuda" else None,
        devices=[torch.cuda.get_device_name()] if device == "cuda" else ["CPU"],
    )


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def _stages(pipe, job: Job, dtype, device) -> dict[str, Stage]:
    """Prepare stages whose calls equal the pipeline's own, so that nothing is compiled twice."""
    given = npz.read(job.inputs)

    def image_like(x):
        return torch.tensor(np.moveaxis(x, -1, 1), dtype=dtype, device=device).contiguous()

    sample, latent = image_like(npz.pair(given["noise"])), image_like(given["latent"])
    tokens = torch.tensor(given["tokens"], dtype=torch.int64, device=device)
    context = torch.tensor(given["context"], dtype=dtype, device=device)
    timestep = torch.tensor(int(given["rows"][0, 0]), device=device)

    def unet():
        return pipe.unet(
            sample,
            timestep,
            encoder_hidden_states=context,
            timestep_cond=None,
            cross_attention_kwargs=None,
            added_cond_kwargs=None,
            return_dict=False,
        )[0]

    def decode():
        scaled = latent / pipe.vae.config.scaling_factor
        return pixels(array(pipe.vae.decode(scaled, return_dict=False, generator=None)[0]))

    def array(x):
        x = x.float().cpu().numpy()
        return np.moveaxis(x, 1, -1) if x.ndim == 4 else x

    def timed_alike(function):
        """Return a function that waits for the result and returns it as an array."""

        @torch.inference_mode()
        def run():
            result = function()
            return result if isinstance(result, np.ndarray) else array(result)

        return run

    return {
        "text_encoder": Stage(
            timed_alike(lambda: pipe.text_encoder(tokens)[0]), lambda context: context
        ),
        "unet_step": Stage(timed_alike(unet), guided),
        "decoder": Stage(timed_alike(decode), lambda images: images),
    }
