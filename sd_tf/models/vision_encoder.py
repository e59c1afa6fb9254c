"""CLIP's vision transformer: a picture → one embedding, and a token for each patch."""

from keras import ops

from sd_tf.models.layers import Block, LayerNorm, Table, dense, embedding, strided_conv
from sd_tf.models.text_encoder import EncoderLayer


class PatchEmbeddings(Block):
    """Patches (B, S, S, 3) → (B, 1 + patches, D): a learnt token stands for the whole picture."""

    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        width, size = config.hidden_size, config.patch_size
        self.class_embedding = Table((width,), dtype)
        self.patch_embedding = strided_conv(3, width, dtype, size, size, use_bias=False)
        self.position_embedding = embedding(config.num_tokens, width, dtype)

    def call(self, pictures):
        patches = self.patch_embedding(pictures)
        patches = ops.reshape(patches, (-1, patches.shape[1] * patches.shape[2], patches.shape[3]))
        first = ops.cast(self.class_embedding.values[None, None], patches.dtype)
        first = ops.broadcast_to(first, (ops.shape(patches)[0], 1, patches.shape[2]))
        positions = ops.arange(patches.shape[1] + 1, dtype="int32")
        tokens = ops.concatenate([first, patches], axis=1)
        return tokens + self.position_embedding(positions)[None]


class VisionLayers(Block):
    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        self.layers = [EncoderLayer(config, dtype, causal=False) for _ in range(config.num_layers)]


class VisionTransformer(Block):
    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        width, epsilon = config.hidden_size, config.layer_norm_eps
        self.embeddings = PatchEmbeddings(config, dtype)
        self.pre_layrnorm = LayerNorm(width, epsilon, dtype)  # as the checkpoints spell it
        self.encoder = VisionLayers(config, dtype)
        self.post_layernorm = LayerNorm(width, epsilon, dtype)


class VisionEncoder(Block):
    """Maps normalized pictures (B, S, S, 3) to {"embedding": (B, P), "tokens": (B, N, D)}.

    The tokens are the penultimate layer's.
    """

    def __init__(self, config, dtype=None):
        super().__init__(dtype)
        self.config = config
        self.vision_model = VisionTransformer(config, dtype)
        self.visual_projection = dense(config.hidden_size, config.projection_dim, False, dtype)

    def call(self, pictures):
        vision = self.vision_model
        x = vision.pre_layrnorm(vision.embeddings(pictures))
        *layers, last = vision.encoder.layers
        for layer in layers:
            x = layer(x)
        whole = vision.post_layernorm(last(x)[:, 0])
        return {"embedding": self.visual_projection(whole), "tokens": x}
