"""Translate the JSON files of a diffusers folder's CLIP encoders and autoencoder, and back.

They become the configurations of `sd_tf.config`; `diffusers_unet` and `diffusers_transformers`
translate those of the denoisers.
"""

from sd_tf.config import START_TOKEN, AutoencoderConfig, TextEncoderConfig, VisionEncoderConfig
from sd_tf.weights.diffusers_fields import Fields

ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}

# Fields of transformers' configurations that this model does not read: bookkeeping, training, and
# the settings of text generation that old releases wrote into every file.
TRANSFORMERS_HARMLESS = """
    architectures attention_dropout bos_token_id chunk_size_feed_forward dropout dtype
    gradient_checkpointing id2label initializer_factor initializer_range is_encoder_decoder
    label2id model_type output_attentions output_hidden_states pad_token_id problem_type
    projection_dim return_dict tie_word_embeddings torch_dtype torchscript transformers_version
    use_bfloat16 use_cache
    add_cross_attention bad_words_ids cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size finetuning_task
    forced_bos_token_id forced_eos_token_id is_decoder length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores prefix
    pruned_heads remove_invalid_values repetition_penalty return_dict_in_generate sep_token_id
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k
    top_p typical_p
""".split()


def read_text_encoder(raw, where: str, projected: bool, penultimate: bool) -> TextEncoderConfig:
    """Read a text encoder's `config.json`.

    Args:
        projected: whether its class also gives a pooled, projected output.
        penultimate: whether the context is the penultimate layer's output, as in SDXL.
    """
    fields = Fields(raw, where)
    fields.require("model_type", "clip_text_model", default="clip_text_model")
    eos = fields.take("eos_token_id", 2)
    width = fields.take("hidden_size", 512)
    config = TextEncoderConfig(
        hidden_size=width,
        intermediate_size=fields.take("intermediate_size", 2048),
        num_layers=fields.take("num_hidden_layers", 12),
        num_heads=fields.take("num_attention_heads", 8),
        activation=fields.choose("hidden_act", ACTIVATIONS, "quick_gelu"),
        vocab_size=fields.take("vocab_size", 49408),
        max_length=fields.take("max_position_embeddings", 77),
        layer_norm_eps=fields.take("layer_norm_eps", 1e-5),
        context_layer=2 if penultimate else 1,
        context_norm=not penultimate,
        projection_dim=fields.take("projection_dim", 512) if projected else None,
        # The value 2 is an old mistake in published files; it means the highest id of the prompt.
        eos_token_id=None if eos == 2 else eos,
    )
    fields.finish(TRANSFORMERS_HARMLESS)
    return config


def write_text_encoder(config: TextEncoderConfig) -> dict:
    names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    projected = config.projection_dim is not None
    return {
        "architectures": ["CLIPTextModelWithProjection" if projected else "CLIPTextModel"],
        "model_type": "clip_text_model",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "hidden_act": names[config.activation],
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_length,
        "layer_norm_eps": config.layer_norm_eps,
        "projection_dim": config.projection_dim if projected else config.hidden_size,
        "bos_token_id": START_TOKEN,
        "eos_token_id": 2 if config.eos_token_id is None else config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }


def read_vision_encoder(raw, where: str) -> VisionEncoderConfig:
    """Read the `config.json` of CLIP's vision encoder."""
    fields = Fields(raw, where)
    fields.require("model_type", "clip_vision_model", default="clip_vision_model")
    fields.require("num_channels", 3, default=3)
    config = VisionEncoderConfig(
        hidden_size=fields.take("hidden_size", 768),
        intermediate_size=fields.take("intermediate_size", 3072),
        num_layers=fields.take("num_hidden_layers", 12),
        num_heads=fields.take("num_attention_heads", 12),
        patch_size=fields.take("patch_size", 32),
        image_size=fields.take("image_size", 224),
        projection_dim=fields.take("projection_dim", 512),
        activation=fields.choose("hidden_act", ACTIVATIONS, "quick_gelu"),
        layer_norm_eps=fields.take("layer_norm_eps", 1e-5),
    )
    fields.finish(TRANSFORMERS_HARMLESS)
    return config


def read_vae(
    raw, where: str, of_transformer: bool = False, upcasts: bool = False
) -> AutoencoderConfig:
    """Read the autoencoder's `config.json`.

    Args:
        of_transformer: whether its pipeline shifts latents, and ignores `force_upcast`, as those
            of SD3 and Flux do.
        upcasts: what an absent `force_upcast` means.
    """
    fields = Fields(raw, where)
    channels = tuple(fields.take("block_out_channels", (64,)))
    for name, kind in (
        ("down_block_types", "DownEncoderBlock2D"),
        ("up_block_types", "UpDecoderBlock2D"),
    ):
        fields.require(name, [kind] * len(channels), default=[kind])
    for name, *allowed in (
        ("act_fn", "silu", "swish"),
        ("latents_mean", None),
        ("latents_std", None),
        *(() if of_transformer else (("shift_factor", None, 0),)),
    ):
        fields.require(name, *allowed, default=allowed[0])
    shift, upcast = fields.take("shift_factor", None), bool(fields.take("force_upcast", upcasts))
    config = AutoencoderConfig(
        in_channels=fields.take("in_channels", 3),
        out_channels=fields.take("out_channels", 3),
        channels=channels,
        layers_per_block=fields.take("layers_per_block", 1),
        latent_channels=fields.take("latent_channels", 4),
        norm_groups=fields.take("norm_num_groups", 32),
        mid_attention=fields.take("mid_block_add_attention", True),
        quant_conv=fields.take("use_quant_conv", True),
        post_quant_conv=fields.take("use_post_quant_conv", True),
        scaling_factor=fields.take("scaling_factor", 0.18215),
        shift_factor=0.0 if shift is None else shift,
        force_upcast=upcast and not of_transformer,
        sample_size=fields.take("sample_size", 512),
    )
    fields.finish()
    return config


def write_vae(config: AutoencoderConfig) -> dict:
    levels = len(config.channels)
    return {
        "_class_name": "AutoencoderKL",
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
        "block_out_channels": list(config.channels),
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "layers_per_block": config.layers_per_block,
        "latent_channels": config.latent_channels,
        "norm_num_groups": config.norm_groups,
        "mid_block_add_attention": config.mid_attention,
        "use_quant_conv": config.quant_conv,
        "use_post_quant_conv": config.post_quant_conv,
        "scaling_factor": config.scaling_factor,
        "shift_factor": config.shift_factor,
        "force_upcast": config.force_upcast,
        "sample_size": config.sample_size,
        "act_fn": "silu",
    }
