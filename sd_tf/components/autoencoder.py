"""Endpoints of the autoencoder's halves: latents to pictures, and pictures to latents."""

from keras import ops

from sd_tf.components.spec import Endpoint, Spec, as_is
from sd_tf.components.tiles import Tiles, in_tiles
from sd_tf.config import LatentScale
from sd_tf.runtime.shapes import Shape, Shapes


def decoder(
    vae, scale: LatentScale, tiles: Tiles, shapes: Shapes, shape: Shape, shared=as_is
) -> dict[str, Endpoint]:
    """Declare the endpoint from latents (B, h, w, c) to pictures (B, H, W, 3), uint8."""
    model = shared(vae.decode, open_batch=True)
    height, width, _ = shapes.latent(shape.size)

    def pictures(latent):
        return ops.cast(model(latent), "float32")

    def decode(latent):
        size, factor = (height, width), shapes.downscale
        latent = scale.undo(latent)
        images = in_tiles(pictures, latent, tiles, size, taken=1, given=factor, channels=3)
        images = ops.round(255.0 * ops.clip(images / 2.0 + 0.5, 0.0, 1.0))
        return {"generated_images": ops.cast(images, "uint8")}

    latent = {"latent": Spec((shape.batch_size, *shapes.latent(shape.size)))}
    return {"serving_default": Endpoint(decode, latent)}


def image_encoder(
    vae, tiles: Tiles, shapes: Shapes, shape: Shape, shared=as_is
) -> dict[str, Endpoint]:
    """Declare the endpoint from images (B, H, W, 3) in [-1, 1] to the posterior of their latents.

    Its outputs are the posterior's mode, not scaled, and its standard deviation.
    """
    model = shared(vae.encode, open_batch=True)

    height, width, channels = shapes.latent(shape.size)

    def moments(images):
        return ops.cast(ops.concatenate(model(images), axis=-1), "float32")

    def encode(images):
        size, factor = (height, width), shapes.downscale
        found = in_tiles(moments, images, tiles, size, factor, given=1, channels=2 * channels)
        mean, log_variance = ops.split(found, 2, axis=-1)
        return {"latent": mean, "standard_deviation": ops.exp(0.5 * log_variance)}

    images = {"images": Spec((shape.batch_size, *shape.size, 3))}
    return {"serving_default": Endpoint(encode, images)}
