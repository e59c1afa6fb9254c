"""The names that SD3's and Flux's modules have in the original releases, beside diffusers'."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

# A module's name, or the names of those whose rows one fused tensor holds.
Modules = Mapping[str, str | tuple[str, ...]]


@dataclass(frozen=True)
class Names:
    """A transformer's modules by their original names."""

    ends: Modules
    blocks: Mapping[str, tuple[str, Modules]]  # list of blocks → diffusers' list, its modules

    def of(self, module: str) -> str | tuple[str, ...] | None:
        """Return diffusers' name, or names, of a module; None: it is unknown."""
        if module in self.ends:
            return self.ends[module]
        kind, _, rest = module.partition(".")
        number, _, inner = rest.partition(".")
        if kind not in self.blocks:
            return None
        theirs, modules = self.blocks[kind]
        found = modules.get(inner)
        if found is None:
            return None
        found = (found,) if isinstance(found, str) else found
        names = tuple(f"{theirs}.{number}.{name}" for name in found)
        return names[0] if len(names) == 1 else names


def _projections(prefix: str, names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names.split())


# Modules that give shift and scale, where diffusers' give scale and shift: the final norm's, and
# that of the texts in SD3's last block.
FINAL, LAST_TEXTS = "final_layer.adaLN_modulation.1", "context_block.adaLN_modulation.1"
MMDIT = Names(
    ends={
        "x_embedder.proj": "pos_embed.proj",
        "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
        "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
        "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
        "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
        "context_embedder": "context_embedder",
        "final_layer.adaLN_modulation.1": "norm_out.linear",
        "final_layer.linear": "proj_out",
    },
    blocks={
        "joint_blocks": (
            "transformer_blocks",
            {
                "x_block.adaLN_modulation.1": "norm1.linear",
                "x_block.attn.qkv": _projections("attn", "to_q to_k to_v"),
                "x_block.attn.ln_q": "attn.norm_q",
                "x_block.attn.ln_k": "attn.norm_k",
                "x_block.attn.proj": "attn.to_out.0",
                "x_block.attn2.qkv": _projections("attn2", "to_q to_k to_v"),
                "x_block.attn2.ln_q": "attn2.norm_q",
                "x_block.attn2.ln_k": "attn2.norm_k",
                "x_block.attn2.proj": "attn2.to_out.0",
                "x_block.mlp.fc1": "ff.net.0.proj",
                "x_block.mlp.fc2": "ff.net.2",
                "context_block.adaLN_modulation.1": "norm1_context.linear",
                "context_block.attn.qkv": _projections("attn", "add_q_proj add_k_proj add_v_proj"),
                "context_block.attn.ln_q": "attn.norm_added_q",
                "context_block.attn.ln_k": "attn.norm_added_k",
                "context_block.attn.proj": "attn.to_add_out",
                "context_block.mlp.fc1": "ff_context.net.0.proj",
                "context_block.mlp.fc2": "ff_context.net.2",
            },
        )
    },
)
FLUX = Names(
    ends={
        "img_in": "x_embedder",
        "txt_in": "context_embedder",
        "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
        "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
        "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
        "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
        "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
        "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
        "final_layer.adaLN_modulation.1": "norm_out.linear",
        "final_layer.linear": "proj_out",
    },
    blocks={
        "double_blocks": (
            "transformer_blocks",
            {
                "img_mod.lin": "norm1.linear",
                "img_attn.qkv": _projections("attn", "to_q to_k to_v"),
                "img_attn.norm.query_norm": "attn.norm_q",
                "img_attn.norm.key_norm": "attn.norm_k",
                "img_attn.proj": "attn.to_out.0",
                "img_mlp.0": "ff.net.0.proj",
                "img_mlp.2": "ff.net.2",
                "txt_mod.lin": "norm1_context.linear",
                "txt_attn.qkv": _projections("attn", "add_q_proj add_k_proj add_v_proj"),
                "txt_attn.norm.query_norm": "attn.norm_added_q",
                "txt_attn.norm.key_norm": "attn.norm_added_k",
                "txt_attn.proj": "attn.to_add_out",
                "txt_mlp.0": "ff_context.net.0.proj",
                "txt_mlp.2": "ff_context.net.2",
            },
        ),
        "single_blocks": (
            "single_transformer_blocks",
            {
                "modulation.lin": "norm.linear",
                "linear1": (*_projections("attn", "to_q to_k to_v"), "proj_mlp"),
                "norm.query_norm": "attn.norm_q",
                "norm.key_norm": "attn.norm_k",
                "linear2": "proj_out",
            },
        ),
    },
)


def original_modules(modules: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Map a transformer's original names to its modules by diffusers' names: several if fused.

    Modules whose outputs are in another order there are left out.
    """
    names = FLUX if "x_embedder" in modules else MMDIT
    found = {theirs: _several(ours) for theirs, ours in names.ends.items()}
    blocks = {".".join(module.split(".")[:2]) for module in modules}
    for theirs, (ours, inner) in names.blocks.items():
        for number in range(sum(block.startswith(f"{ours}.") for block in blocks)):
            for name in inner:
                block = f"{theirs}.{number}.{name}"
                found[block] = _several(names.of(block))
    last = sum(block.startswith("transformer_blocks.") for block in blocks) - 1
    for reordered in (FINAL, f"joint_blocks.{last}.{LAST_TEXTS}"):
        found.pop(reordered, None)
    return {name: parts for name, parts in found.items() if set(parts) <= set(modules)}


def _several(found: str | tuple[str, ...]) -> tuple[str, ...]:
    return (found,) if isinstance(found, str) else found
