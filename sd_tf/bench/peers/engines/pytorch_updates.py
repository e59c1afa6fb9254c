"""The update of diffusers' training scripts: its UNet, PyTorch's AdamW, and our clipping.

Adapters are PEFT's, on the layers that ours are on.
"""

import diffusers
import numpy as np
import torch

from sd_tf.bench.peers import inputs as npz
from sd_tf.bench.peers.engine import UPDATE, Job, Loaded, Stage
from sd_tf.training.settings import LoraOptions

RATE, BETAS, DECAY, CLIP = 1e-4, (0.9, 0.99), 0.01, 1.0


def load(job: Job) -> Loaded:
    torch.set_num_threads(job.threads)
    unet = diffusers.UNet2DConditionModel.from_pretrained(
        job.checkpoint, subfolder="unet", torch_dtype=torch.float32
    ).train()
    if job.lora_rank is not None:
        from peft import LoraConfig

        rank, targets = job.lora_rank, list(LoraOptions(job.lora_rank).targets("unet"))
        unet.requires_grad_(False)
        unet.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=targets))
    trained = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    schedule = diffusers.DDPMScheduler.from_pretrained(job.checkpoint, subfolder="scheduler")
    if job.engine != "torch":
        unet.to(memory_format=torch.channels_last)
    predict = torch.compile(unet, dynamic=False) if job.engine == "torch_compile" else unet
    optimizer = torch.optim.AdamW(trained, RATE, BETAS, weight_decay=DECAY)
    batch = {name: torch.from_numpy(value) for name, value in npz.read(job.inputs).items()}
    latents, noise = (batch[n].permute(0, 3, 1, 2).contiguous() for n in ("latents", "noise"))
    timesteps, context = batch["timesteps"].long(), batch["context"]
    is_v = schedule.config.prediction_type == "v_prediction"

    def update():
        noisy = schedule.add_noise(latents, noise, timesteps)
        target = schedule.get_velocity(latents, noise, timesteps) if is_v else noise
        loss = torch.nn.functional.mse_loss(predict(noisy, timesteps, context).sample, target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return Loaded({UPDATE: Stage(update, np.array)}, None)
