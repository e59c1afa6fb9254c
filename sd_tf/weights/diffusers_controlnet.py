"""Open a ControlNet's folder as diffusers saves it."""

from collections.abc import Mapping
from pathlib import Path

from sd_tf.config import ControlNetConfig
from sd_tf.files.objects import read_object
from sd_tf.files.tensors import CheckpointError
from sd_tf.weights.controlnet import SIZES, ControlNetCheckpoint
from sd_tf.weights.diffusers import open_component, understood
from sd_tf.weights.diffusers_fields import CONFIG, Fields
from sd_tf.weights.diffusers_unet import read_trunk, write_trunk

CLASS = "ControlNetModel"
# Classes of nets that are not read, and what these are.
OTHERS = {
    "SD3ControlNetModel": "a ControlNet for SD3",
    "FluxControlNetModel": "a ControlNet for Flux",
    "ControlNetUnionModel": "a ControlNet-Union",
    "ControlNetModel_Union": "a ControlNet-Union",
    "ControlNetXSAdapter": "a ControlNet-XS",
    "UNetControlNetXSModel": "a ControlNet-XS",
    "T2IAdapter": "a T2I-Adapter",
}


def class_of(path: Path) -> str | None:
    """Return the class that a folder's `config.json` says that it holds; None without one."""
    file = path / CONFIG
    return read_object(file, CheckpointError).get("_class_name") if file.is_file() else None


def check_class(raw: Mapping, where: str) -> None:
    """Refuse what is not a ControlNet that is read, by the class in its `config.json`."""
    found = raw.get("_class_name")
    if found != CLASS:
        what = OTHERS.get(found, "not a ControlNet")
        raise CheckpointError(
            f"{where} is {what}: its {CONFIG} says {found}. Read are ControlNets for SD1, SD2 and "
            f"SDXL, whose {CONFIG} says {CLASS}."
        )


def open_folder(path: Path, variant: str | None = None) -> ControlNetCheckpoint:
    """Open a folder whose class is `CLASS`."""
    file = path / CONFIG
    with understood(file):
        config = read_controlnet(read_object(file, CheckpointError), str(file))
    name = path.resolve().name
    return ControlNetCheckpoint(
        name,
        str(path),
        "diffusers folder",
        config,
        open_component(path, name, config, variant),
    )


def read_controlnet(raw: Mapping, where: str) -> ControlNetConfig:
    """Read `config.json`: the fields of the hint, and then those of a UNet without a way up."""
    fields = Fields(raw, where)
    fields.require("conditioning_channels", 3, default=3)
    hint = fields.take("conditioning_embedding_out_channels", (16, 32, 96, 256))
    order = {"rgb": False, "bgr": True}
    is_bgr = fields.choose("controlnet_conditioning_channel_order", order, "rgb")
    pools = bool(fields.take("global_pool_conditions", False))
    if heads := fields.take("num_attention_heads", None):  # here it is what it says
        fields.rest["attention_head_dim"] = heads
    trunk, _, _ = read_trunk(fields, _pooled_dim(raw))
    return ControlNetConfig(trunk, tuple(hint), is_bgr, pools)


def write_controlnet(config: ControlNetConfig) -> dict:
    trunk = write_trunk(config.trunk)
    resnets = trunk["layers_per_block"]
    if len(set(resnets)) != 1:
        raise CheckpointError(
            f"Diffusers' ControlNets have as many resnets at each level. Received: {resnets}"
        )
    return {
        "_class_name": CLASS,
        **trunk,
        "layers_per_block": resnets[0],
        "conditioning_channels": 3,
        "conditioning_embedding_out_channels": list(config.hint_channels),
        "controlnet_conditioning_channel_order": "bgr" if config.hint_is_bgr else "rgb",
        "global_pool_conditions": config.pools,
    }


def _pooled_dim(raw: Mapping) -> int | None:
    """Return the width of the pooled text, which its own folder does not tell otherwise."""
    width, of_one = (
        raw.get(name)
        for name in ("projection_class_embeddings_input_dim", "addition_time_embed_dim")
    )
    return width - SIZES * of_one if width and of_one else None
