"""What is trained: a batch in, a loss and figures to watch out. Every draw comes in the batch."""

from collections.abc import Sequence

import keras
import numpy as np
from keras import ops

from sd_tf.config import END_TOKEN, ScheduleConfig
from sd_tf.models.attention import SpatialTransformer
from sd_tf.models.layers import Block, ResnetBlock, dense
from sd_tf.sampling.tables import abar


class Autoencoding(Block):
    """Pictures through the VAE and back: L1 and squared error, and a little KL divergence."""

    def __init__(self, vae, kl_weight: float = 1e-4):
        super().__init__()
        self.vae = vae
        self.kl_weight = kl_weight

    def call(self, batch):
        """batch: images (B, H, W, 3) in [-1, 1], noise (B, h, w, C)."""
        mean, log_variance = (ops.cast(x, "float32") for x in self.vae.encode(batch["images"]))
        latents = mean + ops.exp(0.5 * log_variance) * batch["noise"]
        error = ops.cast(self.vae.decode(latents), "float32") - batch["images"]
        divergence = 0.5 * ops.mean(ops.square(mean) + ops.exp(log_variance) - 1.0 - log_variance)
        squared = ops.mean(ops.square(error))
        loss = ops.mean(ops.abs(error)) + squared + self.kl_weight * divergence
        psnr = 10.0 * ops.log10(4.0 / squared)  # the pictures span 2
        return loss, {"loss": loss, "psnr": psnr, "kl": divergence}


class Denoising(Block):
    """Latents with noise added, back to the noise or to v; the text encoder learns along.

    Weighted by min(SNR, `min_snr`) (Hang et al. 2023), or evenly where that is None. Without a text
    encoder the batch brings what one gave.
    """

    def __init__(self, unet, text_encoder, schedule: ScheduleConfig, min_snr: float | None = 5.0):
        super().__init__()
        self.unet = unet
        self.text_encoder = text_encoder
        self.prediction = schedule.prediction
        signal = abar(schedule).astype("float64")
        snr = signal / (1.0 - signal)
        weight = np.ones_like(snr) if min_snr is None else np.minimum(snr, min_snr)
        if min_snr is not None:  # the weight is one of x_0; the loss is of v or of the noise
            weight = weight / (snr + 1.0 if self.prediction == "v_prediction" else snr)
        self.alpha, self.sigma, self.weight = (
            x.astype("float32") for x in (np.sqrt(signal), np.sqrt(1.0 - signal), weight)
        )

    def call(self, batch):
        """batch: latents and noise (B, h, w, C), timesteps (B,), tokens (B, 77) or context
        (B, 77, D), and perhaps what stands beside the noisy latents, (B, h, w, C').
        """
        timesteps = batch["timesteps"]

        def at(table):
            return ops.reshape(ops.take(ops.convert_to_tensor(table), timesteps), (-1, 1, 1, 1))

        latents, noise = batch["latents"], batch["noise"]
        alpha, sigma = at(self.alpha), at(self.sigma)
        noisy = alpha * latents + sigma * noise
        context = batch.get("context")
        if self.text_encoder is not None:
            context = self.text_encoder(batch["tokens"])["context"]
        if "beside" in batch:
            noisy = ops.concatenate([noisy, batch["beside"]], axis=-1)
        output = ops.cast(self.unet(noisy, timesteps, context), "float32")
        target = noise
        if self.prediction == "v_prediction":
            target = alpha * noise - sigma * latents
        squared = ops.square(output - target)
        loss = ops.mean(at(self.weight) * squared)
        return loss, {"loss": loss, "mse": ops.mean(squared)}


class Editing(Block):
    """InstructPix2Pix: the picture after, from noise, beside the picture before.

    Of the picture after a sample of the encoder's posterior is taken, scaled; of the one before
    the mode, not scaled. Without a VAE the batch brings what one gave.
    """

    def __init__(self, denoising: Denoising, vae, scaling_factor: float):
        super().__init__()
        self.denoising, self.vae = denoising, vae
        self.scaling_factor = scaling_factor

    def call(self, batch):
        """batch: what `Denoising` wants but latents and beside; before and after (B, H, W, 3), or
        their latents mode, mean and deviation (B, h, w, C); posterior (B, h, w, C), unit noise;
        has_picture (B,), 1.0, or 0.0 where the picture before is dropped.
        """
        if self.vae is None:
            mode, mean, deviation = (batch[name] for name in ("mode", "mean", "deviation"))
        else:
            mode = self.vae.encode(batch["before"])[0]
            mean, log_variance = self.vae.encode(batch["after"])
            deviation = ops.exp(0.5 * ops.cast(log_variance, "float32"))
        mode, mean, deviation = (ops.cast(x, "float32") for x in (mode, mean, deviation))
        latents = (mean + deviation * batch["posterior"]) * self.scaling_factor
        beside = mode * ops.reshape(batch["has_picture"], (-1, 1, 1, 1))
        return self.denoising({**batch, "latents": latents, "beside": beside})


class Reading(Block):
    """Captions to answers about their scenes, by a linear layer on the text encoder's context.

    It reads the average over the caption's end and the padding, which is where a causal encoder
    can hold what a whole sentence says: which of two things is left, and what it looks like. The
    layer serves this training only.
    """

    def __init__(self, text_encoder, counts: Sequence[int]):
        """`counts`: of the answers that each question has."""
        super().__init__()
        self.text_encoder = text_encoder
        self.counts = tuple(counts)
        self.layer = dense(text_encoder.config.hidden_size, sum(counts))

    def call(self, batch):
        """batch: tokens (B, 77), answers (B, questions)."""
        tokens, answers = batch["tokens"], batch["answers"]
        context = ops.cast(self.text_encoder(tokens)["context"], "float32")
        is_end = ops.cast(ops.equal(tokens, END_TOKEN), "float32")[..., None]
        pooled = ops.sum(context * is_end, axis=1) / ops.sum(is_end, axis=1)
        said = ops.split(self.layer(pooled), np.cumsum(self.counts)[:-1].tolist(), axis=-1)
        loss, right = 0.0, []
        for i, logits in enumerate(said):
            answer = answers[:, i]
            errors = keras.losses.sparse_categorical_crossentropy(answer, logits, from_logits=True)
            loss = loss + ops.mean(errors)
            right.append(ops.equal(ops.argmax(logits, axis=-1), ops.cast(answer, "int32")))
        all_right = ops.mean(ops.cast(ops.all(ops.stack(right), axis=0), "float32"))
        return loss, {"loss": loss, "all_right": all_right}


def freeze(model: keras.layers.Layer) -> keras.layers.Layer:
    model.trainable = False
    return model


def recomputed(unet: keras.layers.Layer) -> keras.layers.Layer:
    """Gradient checkpointing: its blocks keep nothing but their inputs for the way back, and are
    computed a second time there.
    """
    for layer in unet._flatten_layers():
        if isinstance(layer, ResnetBlock | SpatialTransformer):
            layer.call = keras.remat(layer.call)
    return unet
