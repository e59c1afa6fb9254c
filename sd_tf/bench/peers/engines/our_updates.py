"""Our trainer's update of a UNet's weights."""

import numpy as np

from sd_tf.bench.peers import inputs as npz
from sd_tf.bench.peers.engine import UPDATE, Job, Loaded, Stage
from sd_tf.training.lora import adapt
from sd_tf.training.losses import Denoising
from sd_tf.training.settings import Averaging, LoraOptions, Settings
from sd_tf.training.step import compiled_step
from sd_tf.training.trainer import optimizer_for
from sd_tf.weights import open_checkpoint


def load(job: Job) -> Loaded:
    batch = npz.read(job.inputs)
    size = len(batch["latents"])
    settings = Settings(steps=job.steps, batch_size=size, warm_up=0, averaging=Averaging(None))
    checkpoint = open_checkpoint(job.checkpoint)
    unet = checkpoint.build("unet")
    loss = Denoising(unet, [], checkpoint.config, min_snr=None)
    if job.lora_rank is not None:
        loss, _ = adapt(loss, {"unet": unet}, LoraOptions(job.lora_rank), settings.seed)
    optimizer = optimizer_for(settings, loss.trainable_variables)
    update = compiled_step(loss, optimizer, None, settings)
    return Loaded(
        {UPDATE: Stage(lambda: update(batch), lambda figures: np.array(figures["loss"]))}, None
    )
