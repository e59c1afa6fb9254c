"""Losses: each maps a batch, which holds all random numbers, to a loss and figures to report."""

import contextvars
from collections.abc import Sequence

import keras
import numpy as np
from keras import ops

from sd_tf.components.conditions import Texts, conditioner_of
from sd_tf.components.text_encoder import CLIP_TOKENS, T5_TOKENS, reader_of
from sd_tf.config import END_TOKEN, LatentScale, PipelineConfig
from sd_tf.models.attention import SpatialTransformer
from sd_tf.models.joint import JointBlock
from sd_tf.models.layers import Block, ResnetBlock, dense
from sd_tf.sampling.schedules import training_levels

HINT = "hint"  # the batch's control pictures


def of_each(values):
    """Turn values of the examples, (B,), into factors (B, 1, 1, 1) of their latents."""
    return ops.reshape(values, (-1, 1, 1, 1))


class Autoencoding(Block):
    """The autoencoder's loss: L1 and squared error, with a small weight on the KL divergence."""

    def __init__(self, vae, kl_weight: float = 1e-4):
        super().__init__()
        self.vae = vae
        self.kl_weight = kl_weight

    def call(self, batch):
        """Compute the loss; batch: images (B, H, W, 3) in [-1, 1], noise (B, h, w, C)."""
        mean, log_variance = (ops.cast(x, "float32") for x in self.vae.encode(batch["images"]))
        latents = mean + ops.exp(0.5 * log_variance) * batch["noise"]
        error = ops.cast(self.vae.decode(latents), "float32") - batch["images"]
        divergence = 0.5 * ops.mean(ops.square(mean) + ops.exp(log_variance) - 1.0 - log_variance)
        squared = ops.mean(ops.square(error))
        loss = ops.mean(ops.abs(error)) + squared + self.kl_weight * divergence
        psnr = 10.0 * ops.log10(4.0 / squared)  # pixels have a range of 2
        return loss, {"loss": loss, "psnr": psnr, "kl": divergence}


class Decoding(Block):
    """A small decoder's loss: L1 and squared error of the pictures that it makes of their latents.

    These are scaled samples of a frozen encoder's posterior.
    """

    def __init__(self, decoder, vae, scale: LatentScale):
        super().__init__()
        self.decoder, self.vae = decoder, vae
        self.scale = scale

    def call(self, batch):
        """Compute the loss; batch: images (B, H, W, 3) in [-1, 1], noise (B, h, w, C)."""
        mean, log_variance = (ops.cast(x, "float32") for x in self.vae.encode(batch["images"]))
        latents = self.scale.apply(mean + ops.exp(0.5 * log_variance) * batch["noise"])
        error = ops.cast(self.decoder.decode(latents), "float32") - batch["images"]
        squared = ops.mean(ops.square(error))
        psnr = 10.0 * ops.log10(4.0 / squared)  # pixels have a range of 2
        return ops.mean(ops.abs(error)) + squared, {"loss": squared, "psnr": psnr}


# Prediction → what the denoiser is to give, of the levels α and σ, the latents and the noise.
TARGETS = {
    "epsilon": lambda alpha, sigma, x0, noise: noise,
    "v_prediction": lambda alpha, sigma, x0, noise: alpha * noise - sigma * x0,
    "flow": lambda alpha, sigma, x0, noise: noise - x0,
}


class Denoising(Block):
    """The denoiser's loss: the squared error of the predicted noise, v or flow.

    Noise levels are weighted by min(SNR, `min_snr`) (Hang et al. 2023), or equally if that is None
    and for a flow. Without text encoders, the batch holds their outputs.
    """

    def __init__(
        self,
        denoiser,
        text_encoders: Sequence[keras.layers.Layer],
        config: PipelineConfig,
        min_snr: float | None = 5.0,
    ):
        super().__init__()
        self.denoiser = denoiser
        self.text_encoders = list(text_encoders)
        self.config, schedule = config, config.schedule
        self.prediction = schedule.prediction
        level = training_levels(schedule)
        weight = np.ones_like(level.signal)
        if min_snr is not None and not schedule.is_flow:
            snr = (level.signal / level.noise) ** 2
            # min(SNR, …) is for errors of x_0; these are of v or the noise.
            weight = np.minimum(snr, min_snr) / (
                snr + 1.0 if self.prediction == "v_prediction" else snr
            )
        # What the model is told: a flow's level, which need not be a whole timestep.
        told = np.arange(len(weight))
        if schedule.is_flow:
            told = schedule.num_train_timesteps * level.noise
        self.alpha, self.sigma, self.weight, self.told = (
            x.astype("float32") for x in (level.signal, level.noise, weight, told)
        )
        counts = conditioner_of(config).counts(config, 1)
        self.more = {} if counts is None else {"counts": counts}

    def call(self, batch):
        """Compute the loss.

        batch: latents and noise (B, h, w, C), timesteps (B,), tokens (B, 77) or (B, encoders, 77)
        and t5_tokens (B, L) where there is a T5, or else context (B, L, D) and pooled (B, P) of
        the families that have it. Optionally:
        beside (B, h, w, C'), which the denoiser gets beside the noisy latents; time_ids (B, 6);
        hint (B, H, W, 3), control pictures for a `Steered` one; has_text (B,), 1.0, or 0.0 to give
        zeros for the text; weights (B,), factors of the examples' losses.
        """
        timesteps = batch["timesteps"]
        noisy = self.at(self.alpha, batch) * batch["latents"]
        noisy = noisy + self.at(self.sigma, batch) * batch["noise"]
        seen = ops.concatenate([noisy, batch["beside"]], axis=-1) if "beside" in batch else noisy
        is_flow = self.config.schedule.is_flow
        told = ops.take(ops.convert_to_tensor(self.told), timesteps) if is_flow else timesteps
        given = {**self.conditions(batch), **self.more}
        output = ops.cast(self.denoiser(seen, told, **given), "float32")
        squared = ops.square(output - self.target(batch, noisy))
        weight = self.at(self.weight, batch)
        if "weights" in batch:
            weight = weight * of_each(batch["weights"])
        loss = ops.mean(weight * squared)
        return loss, {"loss": loss, "mse": ops.mean(squared)}

    def at(self, table, batch):
        """Look up the value (B, 1, 1, 1) of each example's timestep."""
        return of_each(ops.take(ops.convert_to_tensor(table), batch["timesteps"]))

    def target(self, batch, noisy):
        """Return what the denoiser is to give of the noisy latents."""
        alpha, sigma = self.at(self.alpha, batch), self.at(self.sigma, batch)
        return TARGETS[self.prediction](alpha, sigma, batch["latents"], batch["noise"])

    def conditions(self, batch):
        """Return what the denoiser is given beside latents and timesteps, by name."""
        text = {name: batch[name] for name in ("context", "pooled") if name in batch}
        if self.text_encoders:
            encoders = dict(zip(self.config.text_encoders, self.text_encoders, strict=True))
            read = reader_of(encoders, self.config)
            tokens = {name: batch[name] for name in (CLIP_TOKENS, T5_TOKENS) if name in batch}
            texts = Texts(*read(**tokens))
            text = conditioner_of(self.config).conditions(self.config, texts)
        if "has_text" in batch:
            text = {
                name: x * ops.reshape(batch["has_text"], (-1,) + (1,) * (len(x.shape) - 1))
                for name, x in text.items()
            }
        return text | {name: batch[name] for name in ("time_ids", HINT) if name in batch}


class Steered(Block):
    """A UNet and a ControlNet that steers it, as one denoiser that also takes control pictures."""

    def __init__(self, unet, net):
        super().__init__()
        self.unet, self.net = unet, net

    def call(self, latents, timesteps, context, hint, **given):
        """Predict as the UNet does; hint: pictures (B, H, W, 3) in 0…1."""
        noisy = latents[..., : self.net.config.in_channels]
        control = self.net(noisy, timesteps, context, self.net.hint(hint), **given)
        return self.unet(latents, timesteps, context, control=control, **given)


class Editing(Block):
    """InstructPix2Pix's loss: denoise the picture after, given the picture before.

    Latents of the picture after are scaled samples of the encoder's posterior; those of the picture
    before are its mode, not scaled. Without a VAE, the batch holds the latents.
    """

    def __init__(self, denoising: Denoising, vae, scale: LatentScale):
        super().__init__()
        self.denoising, self.vae = denoising, vae
        self.scale = scale

    def call(self, batch):
        """Compute the loss.

        batch: the batch of `Denoising` without latents and beside; before and after (B, H, W, 3),
        or their latents mode, mean and deviation (B, h, w, C); posterior (B, h, w, C), unit noise;
        has_picture (B,), 1.0, or 0.0 to drop the picture before.
        """
        if self.vae is None:
            mode, mean, deviation = (batch[name] for name in ("mode", "mean", "deviation"))
        else:
            mode = self.vae.encode(batch["before"])[0]
            mean, log_variance = self.vae.encode(batch["after"])
            deviation = ops.exp(0.5 * ops.cast(log_variance, "float32"))
        mode, mean, deviation = (ops.cast(x, "float32") for x in (mode, mean, deviation))
        latents = self.scale.apply(mean + deviation * batch["posterior"])
        beside = mode * of_each(batch["has_picture"])
        return self.denoising({**batch, "latents": latents, "beside": beside})


class Steering(Block):
    """A ControlNet's loss: denoise the picture after, steered by the picture before.

    Latents are scaled samples of the encoder's posterior.
    """

    def __init__(self, denoising: Denoising, vae, scale: LatentScale):
        """Take the loss of a `Steered` denoiser."""
        super().__init__()
        self.denoising, self.vae = denoising, vae
        self.scale = scale

    def call(self, batch):
        """Compute the loss.

        batch: the batch of `Denoising` without latents and hint; before and after (B, H, W, 3) in
        [-1, 1]; posterior (B, h, w, C), unit noise.
        """
        mean, log_variance = (ops.cast(x, "float32") for x in self.vae.encode(batch["after"]))
        latents = self.scale.apply(mean + ops.exp(0.5 * log_variance) * batch["posterior"])
        hint = 0.5 * (batch["before"] + 1.0)
        return self.denoising({**batch, "latents": latents, HINT: hint})


class Reading(Block):
    """The text encoder's loss: answer questions about a caption's scene by a linear layer.

    The layer reads the context's average over the caption's end token and padding, the positions at
    which a causal encoder has seen the whole sentence. It is used in this training only.
    """

    def __init__(self, text_encoder, counts: Sequence[int]):
        """Build the layer; `counts` are the numbers of answers of each question."""
        super().__init__()
        self.text_encoder = text_encoder
        self.counts = tuple(counts)
        self.layer = dense(text_encoder.config.hidden_size, sum(counts))

    def call(self, batch):
        """Compute the loss; batch: tokens (B, 77), answers (B, questions)."""
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


def freeze_unused(text_encoder: keras.layers.Layer) -> None:
    """Freeze the layers that no output depends on, which weight decay alone would change."""
    if text_encoder.text_projection is not None:
        return
    text = text_encoder.text_model
    for layer in text.encoder.layers[text.encoder.context_index + 1 :]:
        layer.trainable = False
    if not text_encoder.config.context_norm:
        text.final_layer_norm.trainable = False


def recomputed(denoiser: keras.layers.Layer) -> keras.layers.Layer:
    """Turn on gradient checkpointing for the denoiser's blocks.

    They keep only their inputs for the backward pass, and are computed a second time in it.
    """
    for layer in denoiser._flatten_layers():
        if isinstance(layer, ResnetBlock | SpatialTransformer | JointBlock):
            layer.call = _again_for_gradients(layer.call)
    return denoiser


def _again_for_gradients(call):
    """Recompute `call` for the gradients, in the context of its call: with the same branches."""

    def run(*inputs, **named):
        context = contextvars.copy_context()
        return keras.remat(lambda *inputs: context.run(call, *inputs, **named))(*inputs)

    return run
