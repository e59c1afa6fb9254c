"""Between latents and pictures: the two halves of the autoencoder."""

from keras import ops

from sd_tf.components import Endpoint, Spec, as_is
from sd_tf.components.fixed import Geometry
from sd_tf.config import PipelineConfig


def decoder(vae, config: PipelineConfig, geometry: Geometry, shared=as_is) -> dict[str, Endpoint]:
    """latent (B, h, w, 4), scaled → pictures (B, H, W, 3), uint8."""
    model = shared(vae.decode)

    def decode(latent):
        images = ops.cast(model(latent / config.vae.scaling_factor), "float32")
        images = ops.round(255.0 * ops.clip(images / 2.0 + 0.5, 0.0, 1.0))
        return {"generated_images": ops.cast(images, "uint8")}

    latent = {"latent": Spec((geometry.batch_size, *geometry.latent_shape))}
    return {"serving_default": Endpoint(decode, latent)}


def image_encoder(vae, geometry: Geometry, shared=as_is) -> dict[str, Endpoint]:
    """images (B, H, W, 3) in [-1, 1] → the posterior's mode, not scaled, and its deviation."""
    model = shared(vae.encode)

    def encode(images):
        mean, log_variance = (ops.cast(x, "float32") for x in model(images))
        return {"latent": mean, "standard_deviation": ops.exp(0.5 * log_variance)}

    images = {"images": Spec((geometry.batch_size, geometry.height, geometry.width, 3))}
    return {"serving_default": Endpoint(encode, images)}
